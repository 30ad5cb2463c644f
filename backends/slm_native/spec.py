"""What a model is, declared: an architecture file writes it, the generic forward reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slm_native.kernels import RopeStyle


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model file.

    Attributes:
        shape: rows first, (out, in) for a matrix.
        required: whether the model is incomplete without it.
        used: False for a tensor that belongs to the model and changes nothing here.
    """

    shape: tuple[int, ...]
    required: bool = True
    used: bool = True


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """The interpolation ramp of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2).

    Attributes:
        n_ctx_original: context length before it was extended.
        beta_fast: dimensions that turn more often than this in ``n_ctx_original`` keep their frequency.
        beta_slow: those that turn less often than this are interpolated wholly.
    """

    n_ctx_original: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary position embedding.

    Attributes:
        style: which values of a head make a pair.
        n_dims: values of a head that are rotated, R.
        freq_base: the base of the geometric series of frequencies.
        factor: context extension; frequencies are divided by it (with YaRN, those that its ramp interpolates).
        yarn: the ramp, None for linear scaling.
        magnitude: factor on rotated queries and keys.
    """

    style: RopeStyle
    n_dims: int
    freq_base: float
    factor: float = 1.0
    yarn: YarnSpec | None = None
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with pre-norms, grouped-query attention and a gated feed-forward layer.

    Attributes:
        architecture: as the file names it.
        n_layers: transformer blocks L.
        n_embd: embedding width E.
        n_vocab: vocabulary size V.
        n_heads: query heads H.
        n_kv_heads: key and value heads K.
        head_dim: width of a head D.
        norm_eps: epsilon of the RMS norms.
        rope: position embedding.
        model_tensors: tensors outside the blocks, by full name.
        block_tensors: tensors of every block, by the name after "blk.N.".
    """

    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    model_tensors: Mapping[str, TensorSpec]
    block_tensors: Mapping[str, TensorSpec]

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Every tensor that the file may hold, by full name."""
        yield from self.model_tensors.items()
        for layer in range(self.n_layers):
            for name, tensor in self.block_tensors.items():
                yield f"blk.{layer}.{name}", tensor
