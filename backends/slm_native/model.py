"""A loaded model of the native engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from slm_core.adapters import Adapter, BaseModel, LoadedAdapters
from slm_core.architectures import ModelSpec, check_tensors, read_spec
from slm_core.checkpoints import Checkpoint
from slm_core.context import ModelBase
from slm_core.errors import InvalidModelFile, InvalidOption, ModelClosed
from slm_core.gguf import GgufFile
from slm_core.modelinfo import model_info
from slm_core.tokenization import model_vocab
from slm_core.types import ContextOptions, Progress
from slm_native.context import BACKEND, NativeContext
from slm_native.kernels import KernelSet
from slm_native.offload import Offload, OffloadStats
from slm_native.transformer import Transformer


class NativeModel(ModelBase):
    """Weights and vocabulary; threads may share it.

    Args:
        gguf: the open file or directory; the model closes it.
        kernels: the kernel set.
        progress: called with the share of the loading that is done.
        offload: the memory budget of the layers; None for no limit.
        swa_full: whether layers with a window keep all positions.
        mtp: whether to load the layer for multi-token prediction; None to load it if the file has one that works.
        settings: settings in effect that the caller chose; see ``ModelInfo.settings``.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``read_spec`` and ``check_tensors``.
        InvalidOption: ``offload`` leaves too little memory, ``swa_full=False`` for a model with recurrent layers, or
            ``mtp=True`` for a model without such a layer, or with options that it does not work with.
    """

    def __init__(
        self,
        gguf: GgufFile | Checkpoint,
        kernels: KernelSet,
        progress: Progress,
        offload: Offload | None = None,
        *,
        swa_full: bool = True,
        mtp: bool | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        spec = read_spec(gguf)
        check_tensors(gguf, spec)
        if _loads_mtp(spec, kernels, offload, mtp):
            spec = spec.with_mtp_layers()
        info = model_info(
            gguf,
            backend=f"{BACKEND} ({kernels.name})",
            device=kernels.device,
            kv_type=kernels.kv_type,
            swa_full=swa_full,
        )
        vocab = model_vocab(gguf, spec.n_vocab)
        if vocab.size != spec.n_vocab:
            raise InvalidModelFile(
                f"{gguf.path}: {vocab.size} tokens in the vocabulary, but {spec.n_vocab} rows in the embedding"
            )
        self._transformer: Transformer | None = Transformer(
            gguf, spec, kernels, progress, offload, keeps_windows=not swa_full
        )
        self._gguf = gguf
        info = replace(info, settings={**(settings or {}), "kernels": kernels.describe(), "swa_full": str(swa_full)})
        base = BaseModel.of(gguf) if self._transformer.takes_adapters else None
        no_adapters = "its layers are loaded for each pass (offload)"
        super().__init__(info, vocab, LoadedAdapters(base, _weakly(self._check_adapter), no_adapters))

    @property
    def steps(self) -> Sequence[str]:
        """The steps between embedding and output matrix, one line each, after fusion by the tier."""
        return self._open_transformer().steps

    @property
    def offload(self) -> OffloadStats | None:
        """Statistics of offloading; None if all layers are in memory."""
        return self._open_transformer().offload

    def _engine_context(self, options: ContextOptions) -> NativeContext:
        return NativeContext(self._open_transformer(), options, self._info.fingerprint, self._adapters)

    def _check_adapter(self, adapter: Adapter) -> None:
        self._open_transformer().check_adapter(adapter)

    def _engine_close(self) -> None:
        self._open_transformer().close()
        self._transformer = None
        self._gguf.close()

    def _open_transformer(self) -> Transformer:
        if self._transformer is None:
            raise ModelClosed(f"the model {self._info.path.name} is closed")
        return self._transformer


def _loads_mtp(spec: ModelSpec, kernels: KernelSet, offload: Offload | None, mtp: bool | None) -> bool:
    """Whether the layer for multi-token prediction is loaded.

    Raises:
        InvalidOption: ``mtp`` is True, and the layer cannot be loaded.
    """
    if mtp is False:
        return False
    obstacles = {
        "the model has no layer for multi-token prediction": not spec.mtp_layers,
        f"the model has {len(spec.mtp_layers)} layers for multi-token prediction": len(spec.mtp_layers) > 1,
        "layers are streamed (resident_bytes)": offload is not None,
        "layers are on several devices (device_map)": kernels.splits,
        "prompts are computed in chunks (prefill.chunk)": kernels.chunk is not None,
    }
    why = next((name for name, holds in obstacles.items() if holds), None)
    if mtp and why is not None:
        raise InvalidOption(f"mtp=True is not supported if {why} (accepted: false)")
    return why is None


def _weakly(method: Callable[[Adapter], None]) -> Callable[[Adapter], None]:
    """A function that calls a method without keeping its object alive. A cycle would keep an unused model in memory."""
    weak = weakref.WeakMethod(method)

    def call(adapter: Adapter) -> None:
        bound_method = weak()
        if bound_method is None:
            raise ModelClosed("the model is closed")
        bound_method(adapter)

    return call
