"""The declaration of a model: architecture files write it, generic forward passes read it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from slm_core.architectures._recurrent import RecurrentSpec

EMBEDDING = "token_embd.weight"
POSITIONS = "position_embd.weight"
TEXT_TYPES = "token_types.weight"
DENSE = ("dense_2", "dense_3")
"""Layers after an encoder's last norm, by their names in files."""


class RopeStyle(Enum):
    """The pairs of a head's D values that RoPE rotates together."""

    INTERLEAVED = "interleaved"
    """Values 2i and 2i+1: llama, whose GGUF rows are permuted for it (ggml's "norm")."""
    HALF_SPLIT = "half_split"
    """Values i and i + D/2: qwen, gemma, phi, ... (ggml's "neox")."""


class NormKind(Enum):
    """How activations are normalized."""

    RMS = "rms"
    """Divided by their root mean square (Zhang and Sennrich, https://arxiv.org/abs/1910.07467)."""
    LAYER = "layer"
    """Mean subtracted, then divided by the standard deviation (Ba et al., https://arxiv.org/abs/1607.06450)."""


class Activation(Enum):
    """The nonlinearity of a feed-forward layer. In a gated layer it applies to the gate, before the product."""

    SILU = "silu"
    """``x * sigmoid(x)``."""
    GELU = "gelu"
    """``x * P(X <= x)`` for a normal X (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415)."""
    GELU_TANH = "gelu_tanh"
    """The tanh approximation of GELU."""
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    SWIGLU_CLAMPED = "swiglu_clamped"
    """gpt-oss: ``g * sigmoid(1.702 g) * (u + 1)``, g at most 7, u from -7 to 7. Gated only."""


@dataclass(frozen=True, slots=True)
class Xielu:
    """The xIELU activation (Huang and Schlag 2024, https://arxiv.org/abs/2411.13010) with its trained parameters.

    ``alpha_p x² + beta x`` above 0, ``alpha_n (expm1(min(x, eps)) - x) + beta x`` below.
    """

    alpha_n: float
    alpha_p: float
    beta: float
    eps: float


AnyActivation: TypeAlias = Activation | Xielu


class Gating(Enum):
    """How a router's scores become the weights of the experts that it chooses."""

    SOFTMAX = "softmax"
    """A softmax over all experts."""
    SIGMOID = "sigmoid"
    """A sigmoid of each expert's score."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """A softmax over the chosen experts."""
    SPARSE_MIXER = "sparse_mixer"
    """For each chosen expert, a softmax over the experts not chosen yet whose scores are within 2 % of its score
    (SparseMixer-v2, Liu et al. 2024, https://arxiv.org/abs/2409.12136, as in Phi 3.5 MoE)."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """An MoE layer: each token uses a few of its experts.

    Attributes:
        n_experts: number of experts X.
        n_used: experts per token.
        gating: how router scores become weights.
        normalized: whether the weights of the chosen experts are divided by their sum.
        scale: factor on the weights.
        scales_input: whether the weights scale the inputs of experts instead of their outputs.
        n_groups: number of groups of adjacent experts.
        n_groups_used: groups per token. The groups with the largest sum of their two best scores are used.
    """

    n_experts: int
    n_used: int
    gating: Gating
    normalized: bool
    scale: float = 1.0
    scales_input: bool = False
    n_groups: int = 1
    n_groups_used: int = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model file.

    Attributes:
        shape: rows first, (out, in) for a matrix.
        required: whether a file without the tensor is refused.
        used: False for a tensor that is known and has no effect here.
    """

    shape: tuple[int, ...]
    required: bool = True
    used: bool = True


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """The interpolation ramp of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2).

    Attributes:
        n_ctx_original: context length before the extension.
        beta_fast: dimensions with more rotations than this in ``n_ctx_original`` positions keep their frequency.
        beta_slow: dimensions with fewer rotations than this are fully interpolated.
        truncated: whether the ends of the ramp in between are rounded outwards to whole dimensions.
    """

    n_ctx_original: int
    beta_fast: float
    beta_slow: float
    truncated: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeSpec:
    """LongRoPE (Ding et al. 2024, https://arxiv.org/abs/2402.13753): two tables of divisors.

    Attributes:
        n_ctx_original: contexts of at most this many positions use the short table, larger contexts the long table.
            All keys of a context use the same table, so that chunks and edits do not matter.
        short: name of the tensor with the short table, [R/2].
        long: name of the tensor with the long table, [R/2].
    """

    n_ctx_original: int
    short: str
    long: str


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary position embedding.

    Attributes:
        style: which values of a head make a pair.
        n_dims: number of rotated values of a head R. The later values are not rotated.
        freq_base: the base of the geometric series of frequencies.
        factor: context extension: frequencies are divided by it (with YaRN, only the interpolated frequencies).
        yarn: the ramp, None for linear scaling.
        magnitude: factor on rotated queries and keys.
        factors: name of the tensor that may hold a divisor for each frequency, [R/2] (Llama 3's scaling), or None.
        long: LongRoPE's divisors, or None.
        sections: the axis of each pair's position, 0 time, 1 height, 2 width, [R/2] (M-RoPE, Qwen2-VL,
            https://arxiv.org/abs/2409.12191); () if all pairs use one position.
    """

    style: RopeStyle
    n_dims: int
    freq_base: float
    factor: float = 1.0
    yarn: YarnSpec | None = None
    magnitude: float = 1.0
    factors: str | None = None
    long: LongRopeSpec | None = None
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """A factor on queries that grows with their position (Nakanishi 2025, https://arxiv.org/abs/2501.19399).

    A query at position p is multiplied by ``1 + scale * log(1 + floor((p + offset) / length))``.
    """

    scale: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), its up-projections absorbed.

    All query heads share one key head of R + C values: R rotated values, then the latent. The latent is the value, too.

    Attributes:
        n_nope: values of an original head that are not rotated, N.
        n_rank: width of the latent, C.
        n_value: values of a head's result.
    """

    n_nope: int
    n_rank: int
    n_value: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One transformer block.

    Attributes:
        tensors: the tensors, by the name after "blk.N.".
        rope: position embedding; None if keys contain no positions.
        window: positions that a token attends to, including its own; None for all earlier positions. A token of an
            encoder attends to half this number of positions on each side, or to all positions if this is None.
        chunk: size of attention chunks, a multiple of 64: a token attends within its chunk. None for no chunks.
        temperature: the factor on queries that grows with their position.
        activation: the activation of the feed-forward layer. The layer is gated if there is a tensor "ffn_gate" or
            experts; without experts and without a tensor "ffn_up" the block has no feed-forward layer.
        experts: the MoE layer. It replaces the dense feed-forward layer; with a norm "pre_ffw_norm_2" both run.
        ffn_norm: name of the norm before the feed-forward layer, if there is one.
        latent: latent attention, instead of separate keys and values.
        attends: whether the block has an attention layer.
        recurrent: a recurrent layer. It replaces attention, or runs in parallel with it on the same input.
        plain_norms: names of the head norms without weights.
        kv_layer: the earlier block whose keys and values are shared; None if they are not shared.
        n_kv_heads: key and value heads K; None for the model's number.
        head_dim: width of a head D; None for the model's width.
        gate_threshold: gates are reduced by mean + this * standard deviation, at least 0; None for plain gates.
    """

    tensors: Mapping[str, TensorSpec]
    rope: RopeSpec | None
    window: int | None = None
    chunk: int | None = None
    temperature: TemperatureSpec | None = None
    activation: AnyActivation = Activation.SILU
    experts: ExpertsSpec | None = None
    ffn_norm: str = "ffn_norm"
    latent: LatentSpec | None = None
    attends: bool = True
    recurrent: RecurrentSpec | None = None
    plain_norms: tuple[str, ...] = ()
    kv_layer: int | None = None
    gate_threshold: float | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None


class KvShape(NamedTuple):
    """The shape of a token's entry in a layer's KV cache.

    Attributes:
        n_kv_heads: key and value heads K.
        head_dim: width of a head D.
        values_in_keys: whether the values are part of the keys (latent attention).
    """

    n_kv_heads: int
    head_dim: int
    values_in_keys: bool

    @property
    def n_values(self) -> int:
        """Numbers per token."""
        return (1 if self.values_in_keys else 2) * self.n_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: a transformer, or a model with recurrent layers instead of attention or in addition to it.

    Defaults are llama's. The tensors decide which norms and biases there are, whether one matrix holds queries, keys
    and values, and whether positions are added to the embeddings. The shape of a query or key norm's weight decides
    what it normalizes: each head with shared weights, each head with its own weights, or all heads at once.

    Attributes:
        architecture: its name in the file.
        n_layers: transformer blocks L.
        n_embd: embedding width E.
        n_vocab: vocabulary size V.
        n_heads: query heads H.
        n_kv_heads: key and value heads K; a layer may override it.
        head_dim: width of a head D; a layer may override it.
        norm_eps: epsilon of the norms.
        model_tensors: tensors outside the blocks, by full name.
        layers: the blocks [L].
        norm: the kind of every norm.
        parallel: attention and feed-forward layer both read the block's input, and both results are added to it;
            a block without ``ffn_norm`` then has one norm for both.
        embedding_scale: factor on token embeddings.
        scales_rows: whether ``embedding_scale`` also applies to embedding rows.
        residual_scale: factor on each layer's output before it is added to the residual stream.
        attention_scale: factor on ``q · k``, None for D ** -0.5 of each layer.
        attention_softcap: c, for ``c tanh(score / c)``.
        alibi_max_bias: ALiBi (Press et al. 2021, https://arxiv.org/abs/2108.12409) instead of RoPE: a key's distance
            times the head's slope is subtracted from its score. Slopes fall from head to head, to 2 ** -this.
        qkv_limit: queries, keys and values are clipped to [-this, this].
        logit_scale: factor on logits.
        logit_softcap: c, for ``c tanh(logit / c)``.
        causal: whether attention is causal. An encoder's is bidirectional, and an encoder has no logits.
        output_norm: name of the norm before the output matrix; "" for an encoder without it.
        active_stream: the residual stream that blocks run on, of several (AltUp); None for a single stream.
        layer_embedding_width: width of the per-layer embeddings; None if there are none.
        mtp_layers: layers for multi-token prediction, the blocks from number L on. They are not among ``layers``; see
            ``with_mtp_layers``.
    """

    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    model_tensors: Mapping[str, TensorSpec]
    layers: tuple[LayerSpec, ...]
    norm: NormKind = NormKind.RMS
    parallel: bool = False
    embedding_scale: float = 1.0
    scales_rows: bool = True
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    alibi_max_bias: float | None = None
    qkv_limit: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    causal: bool = True
    output_norm: str = "output_norm"
    active_stream: int | None = None
    layer_embedding_width: int | None = None
    mtp_layers: tuple[LayerSpec, ...] = ()

    def with_mtp_layers(self) -> ModelSpec:
        """The same model whose ``layers`` end with the MTP layers, so that they have KV caches; L stays as it is."""
        return replace(self, layers=(*self.layers, *self.mtp_layers), mtp_layers=())

    @property
    def n_mtp_layers(self) -> int:
        """The number of MTP layers among ``layers``; 0 unless ``with_mtp_layers`` added them."""
        return len(self.layers) - self.n_layers

    @property
    def is_shiftable(self) -> bool:
        """Whether cached tokens can move to other positions: not with recurrent layers or learned positions."""
        return POSITIONS not in self.model_tensors and not self.recurrent_layers

    @property
    def attention_layers(self) -> list[int]:
        """The blocks with keys and values."""
        indices = [index for index, layer in enumerate(self.layers) if layer.attends and layer.kv_layer is None]
        return indices if self.causal else []

    @property
    def recurrent_layers(self) -> list[int]:
        """The blocks with a recurrent state."""
        return [index for index, layer in enumerate(self.layers) if layer.recurrent is not None]

    @property
    def has_sections(self) -> bool:
        """Whether embedding rows may have M-RoPE positions: the RoPE of every layer has sections."""
        return all(layer.rope is not None and layer.rope.sections for layer in self.layers)

    @property
    def n_positions(self) -> int | None:
        """The number of learned positions, which bounds a sequence; None for no bound."""
        return self.model_tensors[POSITIONS].shape[0] if POSITIONS in self.model_tensors else None

    def kv_shape(self, layer: LayerSpec) -> KvShape:
        """The shape of a token's entry in the KV cache of an attention layer."""
        n_kv_heads = self.n_kv_heads if layer.n_kv_heads is None else layer.n_kv_heads
        return KvShape(n_kv_heads, self.width_of(layer), layer.latent is not None)

    def width_of(self, layer: LayerSpec) -> int:
        """Width of a layer's heads D."""
        return self.head_dim if layer.head_dim is None else layer.head_dim

    def scale_of(self, layer: LayerSpec) -> float:
        """Factor on a layer's ``q · k``."""
        return (self.width_of(layer) or 1) ** -0.5 if self.attention_scale is None else self.attention_scale

    def kv_groups(self, windows: Collection[int] = ()) -> dict[tuple[KvShape, int | None], list[int]]:
        """The blocks with keys and values, grouped by shape and window, in the order of their first blocks.

        Args:
            windows: windows whose layers store only their window. Layers with any other window are grouped with None.
        """
        groups: dict[tuple[KvShape, int | None], list[int]] = {}
        for index in self.attention_layers:
            layer = self.layers[index]
            window = layer.window if layer.window in windows else None
            groups.setdefault((self.kv_shape(layer), window), []).append(index)
        return groups

    @property
    def kv_values_per_token(self) -> int:
        """Numbers per token in the KV cache: keys and values of all heads and layers; each latent once."""
        return sum(shape.n_values * len(blocks) for (shape, _), blocks in self.kv_groups().items())

    @property
    def kv_values_in_windows(self) -> dict[int, int]:
        """The part of ``kv_values_per_token`` in sliding-window layers, by window."""
        windows = {layer.window for layer in self.layers if layer.window is not None}
        n_values: dict[int, int] = {}
        for (shape, window), blocks in self.kv_groups(windows).items():
            if window is not None:
                n_values[window] = n_values.get(window, 0) + shape.n_values * len(blocks)
        return n_values

    @property
    def state_values_per_sequence(self) -> int:
        """Numbers in the recurrent state of a sequence, of any length, in float32."""
        shapes = (layer.recurrent.state_shapes for layer in self.layers if layer.recurrent is not None)
        return sum(math.prod(shape) for layer in shapes for shape in layer)

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Every tensor that the file may have, by full name."""
        yield from self.model_tensors.items()
        for index, layer in enumerate((*self.layers, *self.mtp_layers)):
            for name, tensor in layer.tensors.items():
                yield f"blk.{index}.{name}", tensor
