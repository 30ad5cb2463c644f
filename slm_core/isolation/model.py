"""The parent's side of an isolated model."""

from __future__ import annotations

import os
import socket
import weakref
from concurrent.futures import Future
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from slm_core.context import ModelBase
from slm_core.errors import BackendCrashed, InvalidOption
from slm_core.isolation.adapters import IsolatedAdapters
from slm_core.isolation.channel import Channel
from slm_core.isolation.context import IsolatedContext, declared_of
from slm_core.isolation.control import Control
from slm_core.isolation.options import Isolation
from slm_core.isolation.process import Process, deadline_after
from slm_core.isolation.shared_rows import SharedRows, shared_file
from slm_core.isolation.values import Garbled, Message, pack
from slm_core.isolation.vocab import IsolatedVocab, vocab_of
from slm_core.types import ContextOptions, ModelInfo, ModelOptions, ModelSource, Pooling

_CLOSE_S = 10.0


class IsolatedModel(ModelBase):
    """A model in a child process. Threads may share it.

    Args:
        control: the calls to the process.
        info: the metadata of the model.
        vocab: its vocabulary.
    """

    def __init__(self, control: Control, info: ModelInfo, vocab: IsolatedVocab) -> None:
        super().__init__(info, vocab)
        self._control = control
        self._isolated_adapters = IsolatedAdapters(control)

    @classmethod
    def load(cls, backend: str, target: str, source: ModelSource, options: ModelOptions, isolation: Isolation) -> Self:
        """Start a process and load a model in it; see ``IsolatedBackend.load``."""
        request = _load_request(target, source, options)
        process = Process(backend, isolation)
        control = Control(process)
        try:
            value = control.settled("load", _loaded(process, source, request, options))
            try:
                info, vocab = _info(value["info"]), vocab_of(value["vocab"], control)
            except Exception:
                raise control.garbled("load") from None
            model = cls(control, info, vocab)
        except BaseException:
            process.stop()
            raise
        weakref.finalize(model, process.stop)
        return model

    @property
    def adapters(self) -> IsolatedAdapters:
        """The adapters that are loaded for the model."""
        self._check_open()
        return self._isolated_adapters

    @property
    def pid(self) -> int:
        """The id of the model's process."""
        return self._control.process.pid

    @property
    def crashed(self) -> Future[BackendCrashed]:
        """Gets the error when the model's process ends unexpectedly, also between calls."""
        return self._control.process.crashed

    def _engine_context(self, options: ContextOptions) -> IsolatedContext:
        parent_end, child_end = socket.socketpair()
        channel, file = Channel(parent_end), shared_file()
        try:
            rows = SharedRows(file)
            with child_end:
                value = self._control.ask("new_context", asdict(options), sent=(child_end.fileno(), file))
            try:
                declared = declared_of(value, options, self._info)
            except Exception:
                raise self._control.garbled("new_context") from None
            return IsolatedContext(self, self._control.process, channel, rows, declared)
        except BaseException:
            channel.close()
            raise
        finally:
            os.close(file)

    def _engine_close(self) -> None:
        process = self._control.process
        try:
            self._control.ask("close", timeout_s=_CLOSE_S)
        except Exception:  # it has crashed, or fails to close: it is killed
            process.stop()
        except BaseException:
            process.stop()
            raise
        else:
            process.stop(_CLOSE_S)


def _load_request(target: str, source: ModelSource, options: ModelOptions) -> Message:
    for name, value in options.backend_options.items():
        try:
            pack(value)
        except InvalidOption as error:
            raise InvalidOption(f"{name}={value!r}: {error}") from None
    return pack(
        [
            "load",
            target,
            source,
            {
                "device": options.device,
                "n_threads": options.n_threads,
                "has_progress": options.progress is not None,
                "backend_options": dict(options.backend_options),
            },
        ]
    )


def _loaded(process: Process, source: ModelSource, request: Message, options: ModelOptions) -> object:
    """The reply to the load, after all reports of progress."""
    deadline, message = deadline_after(process.isolation.load_timeout_s), request
    call = "load" if isinstance(source, bytes) else f"the load of {source}"
    while True:
        reply = process.exchange(process.control, call, message, deadline=deadline, at_once=True)
        match reply:
            case ["progress", float() | int() as share] if options.progress is not None and 0 <= share <= 1:
                options.progress(share)
                message = pack(["continue"])
            case _:
                return reply


def _info(value: dict[str, Any]) -> ModelInfo:
    """The metadata of the child, checked."""
    for field in fields(ModelInfo):
        if not _fits(value[field.name], str(field.type)):
            raise Garbled(f"info.{field.name}")
    pooling = value["pooling"]
    return ModelInfo(**{**value, "pooling": None if pooling is None else Pooling(pooling)})


def _fits(value: object, annotation: str) -> bool:
    """Whether a value is of the type of a field of ``ModelInfo``."""
    if annotation == "Mapping[str, str]":
        return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    kinds = {"int": int, "bool": bool, "str": str, "Pooling": str, "Path": type(Path()), "None": type(None)}
    return type(value) in [kinds[name] for name in annotation.split(" | ")]
