# The C++ extension, built from csrc/; its docstrings are in csrc/bindings/.
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

interface: str  # the SHA-256 of this file as it was when the extension was built

def available_isas() -> list[str]: ...

class Weights: ...

class CacheLayer:
    @staticmethod
    def of(
        pages: NDArray[np.uint8], keys: str, values: str, n_layers: int, layer: int, n_kv_heads: int, head_dim: int
    ) -> CacheLayer: ...

class Batch:
    def __init__(
        self,
        tokens: NDArray[np.int32],
        pages: NDArray[np.int32],
        n_tokens: NDArray[np.int32],
        n_held: NDArray[np.int32],
        bidirectional: NDArray[np.int32],
    ) -> None: ...

class Angles:
    @staticmethod
    def of(cos: NDArray[np.float32], sin: NDArray[np.float32], interleaved: bool) -> Angles: ...

class Norm:
    @staticmethod
    def of(weight: NDArray[np.float32], bias: NDArray[np.float32] | None, eps: float, centred: bool) -> Norm: ...

class Linear:
    def __init__(
        self,
        weights: Weights,
        scale: float,
        bias: NDArray[np.float32] | None,
        lora_a: Weights | None,
        lora_b: NDArray[np.uint16] | None,
    ) -> None: ...

class Activation:
    @staticmethod
    def of(name: str, numbers: Sequence[float]) -> Activation: ...

class Latent:
    def __init__(
        self,
        q_down: Linear | None,
        q_norm: Norm | None,
        q: Linear,
        kv_down: Linear,
        kv_norm: Norm | None,
        k_up: Sequence[Weights],
        v_up: Sequence[Weights],
    ) -> None: ...

class AltUp:
    def __init__(
        self,
        router: Linear,
        router_norm: Norm,
        predict: Linear,
        correct: Linear,
        scale: NDArray[np.float32],
        active: int,
    ) -> None: ...

class LayerEmbedding:
    def __init__(self, gate: Linear, project: Linear, norm: Norm | None) -> None: ...

class Layer:
    def __init__(
        self,
        linears: Sequence[Linear | None],
        norms: Sequence[Norm | None],
        activation: Activation,
        head_dim: int,
        scale: float,
        softcap: float,
        window: int,
        slopes: NDArray[np.float32] | None,
        sinks: NDArray[np.float32] | None,
        limit: float,
        residual_scale: float,
        parallel: bool,
        threshold: float | None,
        latent: Latent | None,
        moe: MoeLayer | None,
        altup: AltUp | None,
        embedding: LayerEmbedding | None,
        output_scale: float,
    ) -> None: ...

class RoutingOptions:
    @staticmethod
    def of(
        gating: str, n_experts: int, n_used: int, normalized: bool, scale: float, n_groups: int, n_groups_used: int
    ) -> RoutingOptions: ...

class MoeLayer:
    def __init__(
        self,
        router: Linear,
        selection_bias: NDArray[np.float32] | None,
        routing: RoutingOptions,
        gates: Sequence[Linear],
        ups: Sequence[Linear],
        downs: Sequence[Linear],
        activation: Activation,
        scales_input: bool,
        shared: Sequence[Linear | None],
        shared_gate: Linear | None,
    ) -> None: ...

class Kernels:
    def __init__(self, isa: str, n_threads: int) -> None: ...
    @property
    def types(self) -> list[int]: ...
    def matrix(self, data: NDArray[np.uint8], ggml_type: int, n_out: int, n_in: int) -> Weights: ...
    def embed(self, weights: Weights, ids: NDArray[np.int32]) -> NDArray[np.float32]: ...
    def matmul(self, x: NDArray[np.float32], weights: Weights) -> NDArray[np.float32]: ...
    def normalize(self, x: NDArray[np.float32], norm: Norm) -> NDArray[np.float32]: ...
    def project(
        self, x: NDArray[np.float32], norm: Norm | None, linears: Sequence[Linear]
    ) -> list[NDArray[np.float32]]: ...
    def gate_up(
        self,
        x: NDArray[np.float32],
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: Activation,
        threshold: float | None,
    ) -> NDArray[np.float32]: ...
    def activate(
        self, gate: NDArray[np.float32], up: NDArray[np.float32] | None, activation: Activation
    ) -> NDArray[np.float32]: ...
    def split_layer_embeddings(
        self,
        projected: NDArray[np.float32],
        looked_up: NDArray[np.float32],
        norm: Norm,
        projected_share: float,
        looked_up_share: float,
    ) -> NDArray[np.float32]: ...
    def add_shares(
        self, x: Sequence[NDArray[np.float32]], shares: NDArray[np.float32]
    ) -> list[NDArray[np.float32]]: ...
    def add_product(
        self, residual: NDArray[np.float32], x: NDArray[np.float32], linear: Linear
    ) -> NDArray[np.float32]: ...
    def multiply_per_head(self, x: NDArray[np.float32], weights: Sequence[Weights]) -> NDArray[np.float32]: ...
    def run_moe(
        self, x: NDArray[np.float32], norm: Norm | None, router_input: NDArray[np.float32] | None, moe: MoeLayer
    ) -> NDArray[np.float32]: ...
    def rotate_heads(
        self,
        x: NDArray[np.float32],
        width: int,
        norm: Norm | None,
        cos: NDArray[np.float32] | None,
        sin: NDArray[np.float32] | None,
        interleaved: bool,
    ) -> NDArray[np.float32]: ...
    def write(
        self,
        layer: CacheLayer,
        pages: NDArray[np.intp],
        slots: NDArray[np.intp],
        k: NDArray[np.float32],
        v: NDArray[np.float32],
    ) -> None: ...
    def attend(
        self,
        q: NDArray[np.float32],
        layer: CacheLayer,
        batch: Batch,
        scale: float,
        softcap: float,
        window: int,
        slopes: NDArray[np.float32] | None,
        sinks: NDArray[np.float32] | None,
    ) -> NDArray[np.float32]: ...
    def run_layers(
        self,
        x: Sequence[NDArray[np.float32]],
        layers: Sequence[Layer],
        caches: Sequence[CacheLayer],
        angles: Sequence[Angles],
        layer_embeddings: Sequence[NDArray[np.float32] | None],
        pages: NDArray[np.intp],
        slots: NDArray[np.intp],
        batch: Batch,
        output_tokens: Sequence[int] | None,
    ) -> NDArray[np.float32]: ...

class Mamba:
    def __init__(
        self,
        taps: NDArray[np.float32],
        conv_bias: NDArray[np.float32] | None,
        select: Weights,
        step_norm: NDArray[np.float32] | None,
        b_norm: NDArray[np.float32] | None,
        c_norm: NDArray[np.float32] | None,
        epsilons: Sequence[float],
        steps: Weights,
        step_bias: NDArray[np.float32] | None,
        a: NDArray[np.float32],
        d: NDArray[np.float32],
    ) -> None: ...

class Mamba2:
    def __init__(
        self,
        taps: NDArray[np.float32],
        conv_bias: NDArray[np.float32] | None,
        step_bias: NDArray[np.float32],
        a: NDArray[np.float32],
        d: NDArray[np.float32],
        norm: NDArray[np.float32] | None,
        eps: float,
        n_groups: int,
        n_state: int,
    ) -> None: ...

class StateLayer:
    def __init__(
        self, norm: Norm | None, project: Linear, between: Mamba | Mamba2 | NDArray[np.float32], output: Linear
    ) -> None: ...

class TimeMix:
    def __init__(
        self,
        shares: NDArray[np.float32],
        matrices: Sequence[Weights],
        rows: Sequence[NDArray[np.float32]],
        unit: NDArray[np.float32],
        unit_eps: float,
        norm_eps: float,
        slowest: float,
    ) -> None: ...

class ChannelMix:
    def __init__(self, share: NDArray[np.float32], up: Weights, down: Weights) -> None: ...

class RwkvBlock:
    def __init__(
        self, time_norm: Norm, time: TimeMix, output: Linear, channel_norm: Norm, channel: ChannelMix
    ) -> None: ...

class StateKernels:
    def __init__(self, isa: str, n_threads: int) -> None: ...
    def selective_scan(
        self,
        x: NDArray[np.float32],
        steps: NDArray[np.float32],
        a: NDArray[np.float32],
        b: NDArray[np.float32],
        c: NDArray[np.float32],
        state: NDArray[np.float32],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
    def gated_convolution(
        self, projected: NDArray[np.float32], window: NDArray[np.float32], taps: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
    def mamba(
        self,
        projected: NDArray[np.float32],
        window: NDArray[np.float32],
        state: NDArray[np.float32],
        layer: Mamba,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]: ...
    def mamba2(
        self,
        projected: NDArray[np.float32],
        window: NDArray[np.float32],
        state: NDArray[np.float32],
        layer: Mamba2,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]: ...
    def run_layer(
        self,
        x: NDArray[np.float32],
        residual: NDArray[np.float32],
        layer: StateLayer,
        n_sequences: int,
        scale: float,
        before: Sequence[NDArray[np.float32]],
    ) -> tuple[NDArray[np.float32], tuple[NDArray[np.float32], ...]]: ...
    def time_mix(
        self,
        x: NDArray[np.float32],
        last: NDArray[np.float32],
        state: NDArray[np.float32],
        first_value: NDArray[np.float32] | None,
        mix: TimeMix,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]: ...
    def channel_mix(
        self, x: NDArray[np.float32], last: NDArray[np.float32], mix: ChannelMix
    ) -> NDArray[np.float32]: ...
    def rwkv_blocks(
        self,
        x: NDArray[np.float32],
        blocks: Sequence[RwkvBlock],
        before: Sequence[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]],
        first_value: NDArray[np.float32] | None,
    ) -> tuple[
        NDArray[np.float32],
        NDArray[np.float32],
        list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]],
    ]: ...
