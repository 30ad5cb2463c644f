"""The forward pass: embedding, the steps of all layers, output matrix; for every architecture and every kernel set.

Shapes: T tokens of the batch, E embedding width, V vocabulary, L layers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters import Adapter, AdapterSet, stacked, summed_directions
from slm_core.architectures import ModelSpec
from slm_core.errors import InvalidOption, UnsupportedModel
from slm_core.gguf import WeightSource
from slm_core.types import EMBEDDED, ContextOptions, KvType, Logits, States, TopLogits
from slm_native.adapted import Adapted, adapted, changeable
from slm_native.host_batch import HostBatch
from slm_native.kernels import FixedShape, KernelSet, LayerPositions, Linear, Lora
from slm_native.kv import Array, BatchPlan, KvLayer, in_chunks
from slm_native.lowering import Lowering
from slm_native.memory import ContextMemory, KvLayouts, MemoryPlan
from slm_native.mtp import BatchStates, KeptStates, MtpLayer
from slm_native.offload import Layers, Offload, OffloadedLayers, OffloadStats, ResidentLayers
from slm_native.positions import Positions
from slm_native.states import StateGroup
from slm_native.steps import Hidden, PlanKind, Step, StepInputs, run_steps
from slm_native.weights import WeightReader

_KEPT_SETS = 8
"""The largest number of prepared sets of adapters that are kept. Contexts also keep the set that they use."""


class _EmbeddingRows(NamedTuple):
    """Embedding rows in place of tokens, float32 [n, E], and their indices in the batch [n]."""

    rows: NDArray[np.float32]
    indices: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceBatch:
    """A batch on the kernels' device.

    Attributes:
        tokens: ids [T]; 0 for an embedding row.
        embeddings: embedding rows in place of tokens, on the host; None for none.
        positions: position of each token [T].
        plans: destinations of keys and values, by the kind of plan.
        groups: the states of the sequences, for recurrent layers.
        rotations: the RoPE of each layer [L].
        output_mask: the tokens whose rows leave the model [T]; None for all.
        states: the hidden states around the batch, for the MTP layer; None if it does not run.
    """

    tokens: Array
    embeddings: _EmbeddingRows | None
    positions: Array
    plans: Mapping[PlanKind, BatchPlan]
    groups: Sequence[StateGroup]
    rotations: Sequence[LayerPositions]
    output_mask: NDArray[np.bool_] | None
    states: BatchStates | None = None


class Transformer:
    """A model's weights, lowered to steps, and the forward pass. Threads may share it.

    Args:
        gguf: a file that ``check_tensors`` has accepted.
        spec: the model's architecture and sizes.
        kernels: the kernel set.
        progress: called with the share of weights that are prepared.
        offload: the memory budget of the layers; None for no limit.
        keeps_windows: whether sliding-window layers keep only their window; see ``WindowCache``.

    Raises:
        InvalidOption: ``offload`` leaves too little memory, ``keeps_windows`` is set for a model with recurrent layers,
            or the kernels would capture steps that cannot be captured.
    """

    def __init__(
        self,
        gguf: WeightSource,
        spec: ModelSpec,
        kernels: KernelSet,
        progress: Callable[[float], None],
        offload: Offload | None = None,
        *,
        keeps_windows: bool = False,
    ) -> None:
        self.keeps_windows = keeps_windows and any(spec.layers[i].window for i in spec.attention_layers)
        self._reader = WeightReader(gguf, spec, kernels)
        self.spec = spec
        self._kernels = kernels
        self._lowering = Lowering(spec, kernels, keeps_windows=self.keeps_windows)
        self._check_kernels(offload)
        sizes = self._reader.sizes()
        absent = 0 if offload is None else max(0, sum(sizes.blocks) - offload.budget)
        kernels.reserve(sizes._replace(absent=absent))
        self._weights = self._reader.model()
        self._unfused: Sequence[Sequence[Step]] = []  # the steps of each layer that stays in memory
        self._layers = (
            self._resident(progress) if offload is None else self._offloaded(gguf, sizes.blocks, offload, progress)
        )
        self._mtp = self._mtp_layer() if spec.n_mtp_layers else None
        self._adapted: OrderedDict[object, Adapted] = OrderedDict()
        self._adapting = threading.Lock()
        self.positions(1)  # raises now if the RoPE factors are invalid

    def _check_kernels(self, offload: Offload | None) -> None:
        if self.keeps_windows and self.spec.recurrent_layers:
            raise InvalidOption("swa_full=False is not supported if layers have states, too (accepted: true)")
        obstacles = {
            "layers are streamed": offload is not None,
            "experts are chosen on the host": any(layer.experts is not None for layer in self.spec.layers),
            "the model is an encoder": not self.spec.causal,
            "layers keep only their windows": self.keeps_windows,
            "layers have states, or attend in chunks": not self._has_one_plan,
            "a layer for multi-token prediction is loaded (mtp)": self.spec.n_mtp_layers > 0,
        }
        if self._kernels.captures and (why := next((name for name, holds in obstacles.items() if holds), None)):
            self._kernels.forgo_capture(why)
        if self._kernels.chunk is not None and not self._has_one_plan:
            raise InvalidOption(
                "prefill.chunk is not supported if the model is an encoder, or layers have states, attend in chunks, or"
                " keep only their windows (accepted: none)"
            )
        obstacles = {
            "layers are streamed": offload is not None,
            "the model is an encoder": not self.spec.causal,
            "layers have states": any(layer.recurrent is not None for layer in self.spec.layers),
            "layers read keys of other layers": any(layer.kv_layer is not None for layer in self.spec.layers),
            "layers have embeddings of their own": self.spec.layer_embedding_width is not None,
        }
        if self._kernels.splits and (why := next((name for name, holds in obstacles.items() if holds), None)):
            raise InvalidOption(f"device_map is not supported if {why} (accepted: one device)")

    def close(self) -> None:
        """Release the layers' weights. No forward pass may be running."""
        self._layers.close()

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters can change the model: not if layers are loaded for each pass."""
        return self.offload is None

    def check_adapter(self, adapter: Adapter) -> None:
        """Raise ``UnsupportedModel`` if an adapter changes tensors that are prepared in another form."""
        known = changeable([step for layer in self._unfused for step in layer], self._weights.output)
        if others := [name for name in adapter.info.tensors if name not in known]:
            raise UnsupportedModel(f"adapters that change {others[0]} are not implemented in this backend")

    @property
    def keeps_layer_states(self) -> bool:
        """Whether ``layer_states`` works: not if layers are loaded in each pass, nor with several residual streams."""
        return self.offload is None and self._weights.streams is None

    def adapted(self, adapters: AdapterSet, keeps: Sequence[int] = ()) -> Adapted | None:
        """The parts of the model that adapters change; None if nothing changes. The latest sets are kept.

        Args:
            adapters: the adapters.
            keeps: the layers whose states are kept, in ascending order; see ``layer_states``.
        """
        if not adapters and not keeps:
            return None
        key = tuple(use.key for use in adapters), tuple(keeps)
        with self._adapting:
            if key not in self._adapted:
                weights, changes = self._weights, stacked(adapters)
                steps = self._changed_steps(adapters, keeps)
                parts = adapted(self._kernels, steps, weights.output, weights.token_embd, changes)
                self._kernels.ready()
                self._adapted[key] = parts
            self._adapted.move_to_end(key)
            while len(self._adapted) > _KEPT_SETS:
                self._adapted.popitem(last=False)
            return self._adapted[key]

    def _changed_steps(self, adapters: AdapterSet, keeps: Sequence[int]) -> list[Step]:
        """The steps of all layers, not fused, with directions of control vectors and steps that keep states."""
        directions = summed_directions(adapters)
        steps: list[Step] = []
        for i, layer in enumerate(self._unfused):
            changed = self._lowering.with_direction(i, layer, directions[i]) if i in directions else layer
            steps += self._lowering.keeping(i, changed) if i in keeps else changed
        return steps

    @property
    def steps(self) -> Sequence[str]:
        """The steps from the embeddings to the last norm, one line each, after fusion by the kernel set."""
        return self._layers.describe()

    @property
    def offload(self) -> OffloadStats | None:
        """Statistics of offloading; None if all blocks are in memory."""
        return self._layers.stats

    def positions(self, n_ctx: int) -> Positions:
        """The position embeddings for a context of ``n_ctx`` positions.

        Raises:
            InvalidModelFile: a RoPE factor in the file is not a positive number.
        """
        return Positions(self.spec, n_ctx, self._reader.rope_factors, self._kernels)

    def forward(self, batch: HostBatch, *, hidden: bool = False) -> Logits | States:
        """Run a batch, write its keys, values and states to their destinations, and copy its rows to host memory.

        Args:
            batch: the batch.
            hidden: whether to return hidden states instead of logits.

        Returns:
            float32 [n, V], or [n, E] of hidden states, for the n tokens of the output mask.
        """
        rows = self.rows(batch, hidden=hidden)
        width = self.spec.n_embd if hidden else self.spec.n_vocab
        return self._kernels.to_host(rows) if len(rows) else np.empty((0, width), np.float32)

    def layer_states(self, batch: HostBatch, layers: Sequence[int]) -> States:
        """Like ``forward``; returns hidden states after layers, float32 [n, len(layers), E].

        Args:
            batch: the batch, whose ``adapted`` keeps the states of these layers.
            layers: numbers of layers.
        """
        parts = [self._layer_states(part, layers) for part in batch.parts(self._kernels.chunk)]
        return np.concatenate(parts)

    def _layer_states(self, batch: HostBatch, layers: Sequence[int]) -> States:
        kernels, mask = self._kernels, np.flatnonzero(batch.output_mask)
        on_device = replace(self._on_device(batch), output_mask=None)
        x = self._embed(on_device, batch.adapted)
        inputs = self._step_inputs(on_device, batch.layers, x)
        if on_device.states is None:
            self._through_layers(x, inputs, batch.adapted)
        else:
            self._run_with_mtp(on_device, on_device.states, x, inputs, batch.adapted)
        if not len(mask):
            return np.empty((0, len(layers), self.spec.n_embd), np.float32)
        return np.stack([kernels.to_host(kernels.rows(inputs.kept[layer], mask)) for layer in layers], axis=1)

    def top(self, rows: Array, k: int) -> TopLogits:
        """The ``k`` largest logits of each row of ``rows``, which has at least one row."""
        return self._kernels.top_logits(rows, k)

    @property
    def picks_top(self) -> bool:
        """Whether ``top`` computes on the device, so that full rows of logits stay there."""
        return self._kernels.picks_top

    def rows(self, batch: HostBatch, *, hidden: bool = False) -> Array:
        """Like ``forward``, but rows stay on the device, valid until the next call; [0, E] for an empty output mask."""
        first, *others = batch.parts(self._kernels.chunk)
        if not others:
            return self._part(first, hidden=hidden)
        concatenated = self._kernels.concatenated  # copies: the rows of a captured step are valid until the next one
        parts = [concatenated([self._part(part, hidden=hidden)]) for part in (first, *others)]
        nonempty = [rows for rows in parts if len(rows)] or parts[-1:]
        return nonempty[0] if len(nonempty) == 1 else concatenated(nonempty)

    def _part(self, batch: HostBatch, *, hidden: bool) -> Array:
        kernels, pages, mask = self._kernels, batch.plan.pages, batch.output_mask
        is_plain = not hidden and not len(batch.rows) and not pages.has_blocks and batch.adapted is None
        if self._has_one_plan and is_plain and batch.states is None:
            shape = kernels.fixed(pages, batch.layers) if mask.all() else None
            shape = kernels.fixed_prefill(pages, batch.layers) if not mask.any() else shape
            if shape is not None:
                n_rows = len(batch) if shape.output_mask is None else 0
                ids = batch.tokens, batch.positions, batch.rope_positions
                logits = self._run_shape(shape, *ids, batch.layers, batch.embedded)
                return kernels.rows(logits, slice(n_rows))
        return self._run(self._on_device(batch), batch.layers, hidden=hidden, adapted=batch.adapted)

    def _on_device(self, batch: HostBatch) -> _DeviceBatch:
        kernels, tokens, embeddings = self._kernels, batch.tokens, None
        if len(batch.rows):
            tokens, where = np.maximum(tokens, 0), np.flatnonzero(tokens == EMBEDDED)
            embeddings = _EmbeddingRows(batch.rows, where)
        rotations = batch.embedded.at(batch.rope_positions)
        staged = kernels.stage(tokens), kernels.stage(batch.positions), self._plans(batch.plan), rotations
        ids, positions, plans, rotations = kernels.arrived(staged)
        return _DeviceBatch(
            ids, embeddings, positions, plans, batch.plan.states, rotations, batch.output_mask, batch.states
        )

    def predict(self, batch: HostBatch, state: Array) -> tuple[Array, Array]:
        """Run only the MTP layer, on one token.

        Args:
            batch: the token.
            state: the hidden state of the token before it [1, E].

        Returns:
            The logits of the token after it [1, V], and the hidden state of the layer [1, E].
        """
        assert self._mtp is not None, "the context declares MTP"
        on_device, adapted = self._on_device(batch), batch.adapted
        embedded = self._mtp_embedded(on_device, self._embed(on_device, adapted))
        state = self._mtp.run(embedded, state, self._step_inputs(on_device, batch.layers, embedded))
        shared = self._mtp.weights.output is self._weights.output
        output = adapted.output if shared and adapted is not None else self._mtp.weights.output
        return self._scaled(self._kernels.linear(state, output)), state

    @property
    def takes_bias(self) -> bool:
        """Whether the kernels add attention biases of keys."""
        return self._kernels.takes_bias

    def new_states(self) -> KeptStates | None:
        """The hidden states that a context keeps for the MTP layer; None if the layer is not loaded."""
        return None if self._mtp is None else KeptStates(self._kernels, self.spec.n_embd)

    def joined(self, states: Sequence[Array]) -> Array:
        """Hidden states [1, E] of several tokens as [n, E]."""
        return states[0] if len(states) == 1 else self._kernels.concatenated(states)

    def warm(self, layers: Sequence[KvLayer], embedded: Positions) -> None:
        """Run the fixed shapes that the profile warms once, for a new context."""
        for shape in self._kernels.warm_shapes(layers) if self._has_one_plan else ():
            empty = np.zeros(0, np.int32)
            self._run_shape(shape, empty, empty, empty, layers, embedded)

    def _run_shape(
        self,
        shape: FixedShape,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        rope_positions: NDArray[np.integer],
        layers: Sequence[KvLayer],
        embedded: Positions,
    ) -> Array:
        """The logits of a batch that is padded to a fixed shape: [n_tokens, V], valid until the next call."""
        padding = np.zeros(shape.n_tokens - len(tokens), np.int32)
        tokens, positions = (np.concatenate([ids, padding]) for ids in (tokens, positions))
        stage, rotations = self._kernels.stage, embedded.at(np.concatenate([rope_positions, padding]))
        batch = _DeviceBatch(
            stage(tokens), None, stage(positions), {None: shape.plan}, [], rotations, output_mask=shape.output_mask
        )
        return shape.run(lambda batch: self._run(batch, layers), batch)

    def _run(
        self,
        batch: _DeviceBatch,
        layers: Sequence[KvLayer],
        *,
        hidden: bool = False,
        adapted: Adapted | None = None,
    ) -> Array:
        """The rows of the output mask: logits [rows, V], or hidden states [rows, E]; [0, E] for an empty mask."""
        x: Hidden = self._embed(batch, adapted)  # [T, E]
        inputs = self._step_inputs(batch, layers, x)
        output = self._weights.output if adapted is None else adapted.output
        if batch.states is not None:
            rows = self._run_with_mtp(batch, batch.states, x, inputs, adapted)
            return rows if hidden or len(rows) == 0 else self._scaled(self._kernels.linear(rows, output))
        x = self._through_layers(x, inputs, adapted)
        if len(x) == 0:
            return x
        return self._hidden(x) if hidden else self._logits(x, output)

    def _through_layers(self, x: Hidden, inputs: StepInputs, adapted: Adapted | None) -> Hidden:
        layers: Layers = self._layers if adapted is None else adapted.layers
        with layers.walk() as steps_at:
            for i in range(len(layers)):
                x = run_steps(steps_at(i), x, inputs)  # a variable would keep the layer in memory while the next loads
        return x

    def _run_with_mtp(
        self, batch: _DeviceBatch, batch_states: BatchStates, x: Array, inputs: StepInputs, adapted: Adapted | None
    ) -> Array:
        """The hidden states of the output mask [rows, E]; the MTP layer writes its keys and values, too."""
        assert self._mtp is not None, "the batch has states for it"
        kernels, mask = self._kernels, inputs.output_mask
        all_rows = self._through_layers(x, replace(inputs, output_mask=None), adapted)
        batch_states.after = states = kernels.normed(all_rows, self._weights.output_norm)
        no_outputs = replace(inputs, output_mask=np.zeros(len(states), np.bool_))
        self._mtp.run(self._mtp_embedded(batch, x), batch_states.shifted(kernels, states), no_outputs)
        return states if mask is None else kernels.rows(states, mask)

    def _mtp_embedded(self, batch: _DeviceBatch, embedded: Array) -> Array:
        """The embeddings that the MTP layer reads [T, E]: the model's, or rows of a table that only it uses."""
        assert self._mtp is not None, "the batch has states for it"
        table = self._mtp.weights.token_embd
        if table is None:
            return embedded
        x = self._kernels.embed(table, batch.tokens)
        return x if batch.embeddings is None else self._with_rows(x, batch.embeddings)

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """The exceptions that ``forward`` raises if the device fails."""
        return self._kernels.failures

    @property
    def kv_type(self) -> KvType:
        """The default KV type."""
        return self._kernels.kv_type

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """The KV types that the kernels support."""
        return self._kernels.kv_types

    def new_memory(self, options: ContextOptions, layouts: KvLayouts) -> ContextMemory:
        """Memory for keys, values and states on the kernels' device; see ``ContextMemory``."""
        return ContextMemory(self.spec, options, layouts, self._kernels)

    def _plans(self, plan: MemoryPlan) -> dict[PlanKind, BatchPlan]:
        """Destinations of a batch's keys and values, for each kind of plan."""
        plans: dict[PlanKind, BatchPlan] = {None: self._kernels.place(plan.pages)}
        for chunk in {layer.chunk for layer in self.spec.layers if layer.chunk is not None}:
            chunked = in_chunks(plan.pages, chunk)
            plans["chunk", chunk] = plans[None] if chunked is plan.pages else self._kernels.place(chunked)
        windows = {("window", window): self._kernels.place(pages) for window, pages in plan.windows.items()}
        return plans | windows

    def _resident(self, progress: Callable[[float], None]) -> ResidentLayers:
        layers: list[list[Step]] = []
        for i in range(self.spec.n_layers):
            layers.append(self._lowering.layer(i, self._reader.block(i), self._weights))
            progress((i + 1) / self.spec.n_layers)
        self._kernels.ready()
        self._unfused = layers
        return ResidentLayers(self._kernels.fuse([step for layer in layers for step in layer]))

    def _mtp_layer(self) -> MtpLayer:
        index, kernels = self.spec.n_layers, self._kernels
        steps = self._lowering.layer(index, self._reader.block(index), self._weights)
        layer = MtpLayer(kernels, self._reader.mtp(self._weights), kernels.fuse(steps))
        kernels.ready()
        return layer

    def _offloaded(
        self, gguf: WeightSource, sizes: Sequence[int], offload: Offload, progress: Callable[[float], None]
    ) -> OffloadedLayers:
        reader = WeightReader(gguf, self.spec, self._kernels, in_memory=self._kernels.reads_file and gguf.is_mapped)
        reader.check_blocks()
        lowering, weights = self._lowering, self._weights

        def load(i: int) -> list[Step]:  # without self: the loading thread must not keep the model alive
            return lowering.layer(i, reader.block(i), weights)

        layers = OffloadedLayers(load, sizes, offload, self._kernels.settle, progress)
        self._kernels.settle()
        progress(1.0)
        return layers

    def _step_inputs(self, batch: _DeviceBatch, layers: Sequence[KvLayer], x: Array) -> StepInputs:
        spread, all_positions = self._kernels.spread, batch.plans[None]
        plans = [batch.plans.get(kind, all_positions) for kind in self._lowering.plan_kinds]
        layer_embeddings, mask = self._layer_embeddings(batch.tokens, x), batch.output_mask
        mask = None if mask is None or mask.all() else mask
        return StepInputs(spread(batch.rotations), spread(plans), layers, batch.groups, layer_embeddings, mask)

    @property
    def _has_one_plan(self) -> bool:
        """Whether one plan serves all layers: every layer sees the same tokens and pages."""
        return (
            not self.keeps_windows
            and self.spec.causal
            and all(layer.recurrent is None and layer.chunk is None for layer in self.spec.layers)
        )

    def _layer_embeddings(self, tokens: Array, x: Array) -> Sequence[Array | None]:
        """The per-layer embeddings of a batch [L]; None for blocks without one."""
        weights, width = self._weights.layer_embeddings, self.spec.layer_embedding_width
        if weights is None or width is None:
            return [None] * self.spec.n_layers
        return weights.look_up(self._kernels, tokens, x, width)

    def _embed(self, batch: _DeviceBatch, adapted: Adapted | None) -> Array:
        weights = self._weights
        x = self._looked_up(batch.tokens, None if adapted is None else adapted.embedding)
        if batch.embeddings is not None:
            x = self._with_rows(x, batch.embeddings)
        if weights.token_type is not None:
            x = x + weights.token_type
        if weights.position_embd is not None:
            x = x + self._kernels.embed(weights.position_embd, batch.positions)
        return self._kernels.normed(x, weights.embd_norm)

    def _looked_up(self, tokens: Array, change: Lora | None) -> Array:
        x = self._kernels.embed(self._weights.token_embd, tokens)
        if change is not None:
            x = x + self._kernels.matmul(self._kernels.embed(change.b, tokens), change.a)
        return x if self.spec.embedding_scale == 1 else x * self.spec.embedding_scale

    def _with_rows(self, x: Array, embeddings: _EmbeddingRows) -> Array:
        """``x`` [T, E] with the rows at the indices of ``embeddings`` replaced."""
        scale = self.spec.embedding_scale if self.spec.scales_rows else 1.0
        which = np.arange(len(x))
        which[embeddings.indices] = len(x) + np.arange(len(embeddings.rows))
        rows = self._kernels.on_device_of(x, embeddings.rows * np.float32(scale))
        return self._kernels.rows(self._kernels.concatenated([x, rows]), which)

    def _hidden(self, x: Array) -> Array:
        x = self._kernels.normed(x, self._weights.output_norm)
        for dense in self._weights.dense:
            x = self._kernels.linear(x, dense)
        return x

    def _logits(self, x: Array, output: Linear) -> Array:
        (logits,) = self._kernels.project(x, self._weights.output_norm, [output])  # [rows, V]
        return self._scaled(logits)

    def _scaled(self, logits: Array) -> Array:
        if self.spec.logit_scale != 1:
            logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_softcap is None else self._kernels.softcap(logits, self.spec.logit_softcap)
