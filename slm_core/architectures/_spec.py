"""What a model is, declared: an architecture file writes it, the generic forward reads it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from slm_core.architectures._recurrent import RecurrentSpec

EMBEDDING = "token_embd.weight"
POSITIONS = "position_embd.weight"
TEXT_TYPES = "token_types.weight"
DENSE = ("dense_2", "dense_3")
"""Layers behind an encoder's last norm, by the names that files have."""


class RopeStyle(Enum):
    """Which two of a head's D values one angle rotates."""

    INTERLEAVED = "interleaved"
    """Values 2i and 2i+1: llama, whose GGUF rows are permuted for it (ggml's "norm")."""
    HALF_SPLIT = "half_split"
    """Values i and i + D/2: qwen, gemma, phi, ... (ggml's "neox")."""


class NormKind(Enum):
    """How activations are normalized."""

    RMS = "rms"
    """Divided by their root mean square (Zhang and Sennrich, https://arxiv.org/abs/1910.07467)."""
    LAYER = "layer"
    """Mean taken off, then divided by their standard deviation (Ba et al., https://arxiv.org/abs/1607.06450)."""


class Activation(Enum):
    """The nonlinearity of a feed-forward layer; with a gate, it applies to the gate, and the product follows."""

    SILU = "silu"
    """``x * sigmoid(x)``."""
    GELU = "gelu"
    """``x * P(X <= x)`` for a normal X (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415)."""
    GELU_TANH = "gelu_tanh"
    """Its approximation with a tanh."""
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    SWIGLU_CLAMPED = "swiglu_clamped"
    """gpt-oss: ``g * sigmoid(1.702 g) * (u + 1)``, g at most 7, u from -7 to 7. Gated only."""


@dataclass(frozen=True, slots=True)
class Xielu:
    """The xIELU activation (Huang and Schlag 2024, https://arxiv.org/abs/2411.13010), by its trained numbers.

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
    """Each expert by itself."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """A softmax over the chosen ones."""
    SPARSE_MIXER = "sparse_mixer"
    """Of each chosen one, a softmax over those that are left and score within 2 % of it (SparseMixer-v2, Liu et al.
    2024, https://arxiv.org/abs/2409.12136, as Phi 3.5 MoE has it)."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A feed-forward layer of experts, a few of which a token uses.

    Attributes:
        n_experts: how many there are, X.
        n_used: how many a token uses.
        gating: how scores become weights.
        normalized: whether the weights of the chosen are divided by their sum.
        scale: factor on the weights.
        scales_input: whether weights are factors on what experts read, in place of what they make.
        n_groups: adjacent experts are of a group, of which there are so many.
        n_groups_used: a token's experts are of so many groups: those whose two best have the largest sum.
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
        truncated: whether the ends of the ramp between them are rounded to whole dimensions, outwards.
    """

    n_ctx_original: int
    beta_fast: float
    beta_slow: float
    truncated: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeSpec:
    """LongRoPE (Ding et al. 2024, https://arxiv.org/abs/2402.13753): two tables of divisors.

    Attributes:
        n_ctx_original: contexts of at most this many positions use the short table, larger ones the long one. All
            keys of a context are rotated by the same one, so that chunks and edits do not matter.
        short: the tensor with the short table, [R/2].
        long: the tensor with the long one.
    """

    n_ctx_original: int
    short: str
    long: str


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary position embedding.

    Attributes:
        style: which values of a head make a pair.
        n_dims: values of a head that are rotated, R; those behind pass through.
        freq_base: the base of the geometric series of frequencies.
        factor: context extension; frequencies are divided by it (with YaRN, those that its ramp interpolates).
        yarn: the ramp, None for linear scaling.
        magnitude: factor on rotated queries and keys.
        factors: the tensor that may hold a divisor for each frequency, [R/2] (Llama 3's scaling), or None.
        long: LongRoPE's divisors, or None.
        sections: which of time, height and width (0, 1, 2) turns each pair, [R/2] (M-RoPE, Qwen2-VL,
            https://arxiv.org/abs/2409.12191); () where one position turns all.
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
    """Queries far behind are sharpened (Nakanishi 2025, https://arxiv.org/abs/2501.19399).

    A query at position p is multiplied with ``1 + scale * log(1 + floor((p + offset) / length))``.
    """

    scale: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), its up-projections absorbed.

    One key head of R + C values serves all query heads: rotated ones, then the latent, which is the value, too.

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
    """What one transformer block has of its own.

    Attributes:
        tensors: by the name after "blk.N.".
        rope: its position embedding, None where positions are not in the keys.
        window: a token sees this many, itself included; None for all before it. An encoder's token sees half as many
            to each side, and all where it is None.
        chunk: positions fall into chunks of so many, a multiple of 64, and a token sees those of its own; None for all.
        temperature: of its queries.
        activation: of the feed-forward layer, which has a gate where there is a tensor "ffn_gate", or experts; a block
            without a tensor "ffn_up" and without experts has no feed-forward layer.
        experts: in place of one dense feed-forward layer; where there is a norm "pre_ffw_norm_2", beside one.
        ffn_norm: name of the norm before it, where the block has one.
        latent: attention to a latent, in place of keys and values of their own.
        attends: whether it has an attention layer.
        recurrent: a layer with a state, in place of attention or beside it: both read what enters the block.
        plain_norms: norms of heads that have no weight, by name.
        kv_layer: an earlier block, whose keys and values it reads in place of its own.
        n_kv_heads: its key and value heads K, None for the model's.
        head_dim: width of its heads D, likewise.
        gate_threshold: gates of the feed-forward layer count by what they are above their mean and this many of their
            standard deviations; None where they count as they are.
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
    """What a layer keeps of a token.

    Attributes:
        n_kv_heads: key and value heads K.
        head_dim: width of a head D.
        values_in_keys: whether keys are the values, too: where it attends to a latent.
    """

    n_kv_heads: int
    head_dim: int
    values_in_keys: bool

    @property
    def n_values(self) -> int:
        """Numbers for a token."""
        return (1 if self.values_in_keys else 2) * self.n_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: a transformer, or a model whose blocks keep a state in place of keys and values, or beside them.

    What has a default is as in llama where the architecture does not say otherwise.
    Which norms and biases there are, whether queries, keys and values lie in one matrix and whether positions are
    added to the embeddings follows from the tensors. A norm of queries and keys covers what its weight covers: a head,
    each head with its own weights, or all heads at once.

    Attributes:
        architecture: as the file names it.
        n_layers: transformer blocks L.
        n_embd: embedding width E.
        n_vocab: vocabulary size V.
        n_heads: query heads H.
        n_kv_heads: key and value heads K, of layers that do not say otherwise.
        head_dim: width of a head D, likewise.
        norm_eps: epsilon of the norms.
        model_tensors: tensors outside the blocks, by full name.
        layers: the blocks [L].
        norm: of every norm.
        parallel: attention and feed-forward layer both read what enters the block, and their results are added to it;
            a block without ``ffn_norm`` then has one norm for both.
        embedding_scale: factor on token embeddings.
        scales_rows: whether it is on embedding rows that are given in place of tokens, too.
        residual_scale: factor on what a layer adds to the residual stream.
        attention_scale: factor on ``q · k``, None for D ** -0.5 of each layer.
        attention_softcap: c, for ``c tanh(score / c)``.
        alibi_max_bias: ALiBi (Press et al. 2021, https://arxiv.org/abs/2108.12409) in place of rotation: the
            distance of a key, times a slope that falls from head to head to 2 ** -this, is taken off its score.
        qkv_limit: queries, keys and values are clipped to plus and minus this.
        logit_scale: factor on logits.
        logit_softcap: c, for ``c tanh(logit / c)``.
        causal: whether a token sees those before it alone. An encoder's sees all, and there are no logits.
        output_norm: name of the norm before the output matrix; "" where an encoder has none.
        active_stream: of several residual streams (AltUp), the one that blocks run on; None where there is one.
        layer_embedding_width: width of an embedding that each block has of its own, None where there is none.
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

    @property
    def is_shiftable(self) -> bool:
        """Whether what is kept of a token can move: not in a state, nor where positions are in the embedding."""
        return POSITIONS not in self.model_tensors and not self.recurrent_layers

    @property
    def attention_layers(self) -> list[int]:
        """The blocks that keep keys and values."""
        indices = [index for index, layer in enumerate(self.layers) if layer.attends and layer.kv_layer is None]
        return indices if self.causal else []

    @property
    def recurrent_layers(self) -> list[int]:
        """The blocks that keep a state."""
        return [index for index, layer in enumerate(self.layers) if layer.recurrent is not None]

    @property
    def has_sections(self) -> bool:
        """Whether rows may stand apart in time, height and width: every layer's rotation has sections."""
        return all(layer.rope is not None and layer.rope.sections for layer in self.layers)

    @property
    def n_positions(self) -> int | None:
        """Positions that a sequence may have: as many as were learned, None for any number."""
        return self.model_tensors[POSITIONS].shape[0] if POSITIONS in self.model_tensors else None

    def kv_shape(self, layer: LayerSpec) -> KvShape:
        """What a layer keeps of a token, if it keeps keys and values."""
        n_kv_heads = self.n_kv_heads if layer.n_kv_heads is None else layer.n_kv_heads
        return KvShape(n_kv_heads, self.width_of(layer), layer.latent is not None)

    def width_of(self, layer: LayerSpec) -> int:
        """Width of a layer's heads D."""
        return self.head_dim if layer.head_dim is None else layer.head_dim

    def scale_of(self, layer: LayerSpec) -> float:
        """Factor on a layer's ``q · k``."""
        return (self.width_of(layer) or 1) ** -0.5 if self.attention_scale is None else self.attention_scale

    def kv_groups(self, windows: Collection[int] = ()) -> dict[tuple[KvShape, int | None], list[int]]:
        """The blocks that keep keys and values, by what they keep of a token, in the order of their first blocks.

        Args:
            windows: those of layers that do not belong to the others: what they keep goes with their window.
        """
        groups: dict[tuple[KvShape, int | None], list[int]] = {}
        for index in self.attention_layers:
            layer = self.layers[index]
            window = layer.window if layer.window in windows else None
            groups.setdefault((self.kv_shape(layer), window), []).append(index)
        return groups

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache holds for a token: keys and values of all heads and layers; each latent once."""
        return sum(shape.n_values * len(blocks) for (shape, _), blocks in self.kv_groups().items())

    @property
    def kv_values_in_windows(self) -> dict[int, int]:
        """How many of those belong to layers with a window, by that."""
        windows = {layer.window for layer in self.layers if layer.window is not None}
        n_values: dict[int, int] = {}
        for (shape, window), blocks in self.kv_groups(windows).items():
            if window is not None:
                n_values[window] = n_values.get(window, 0) + shape.n_values * len(blocks)
        return n_values

    @property
    def state_values_per_sequence(self) -> int:
        """Numbers that a sequence has besides, however long it is, in float32: its state."""
        shapes = (layer.recurrent.state_shapes for layer in self.layers if layer.recurrent is not None)
        return sum(math.prod(shape) for layer in shapes for shape in layer)

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Every tensor that the file may hold, by full name."""
        yield from self.model_tensors.items()
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.tensors.items():
                yield f"blk.{index}.{name}", tensor
