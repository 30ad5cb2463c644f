"""The program of the child process: ``python -m slm_core.isolation.child CONTROL LIFELINE LEVEL``.

CONTROL and LIFELINE are descriptors of sockets. CONTROL carries calls of the model and its vocabulary; each context has
its own socket and thread. Nothing is sent over LIFELINE: it closes when the parent ends, and then this process ends,
too, even while it runs native code.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from slm_core.errors import PluginError
from slm_core.isolation.channel import Channel
from slm_core.isolation.raised import described
from slm_core.isolation.served_context import ServedContext, declared
from slm_core.isolation.shared_rows import SharedRows
from slm_core.isolation.values import pack
from slm_core.protocols import Backend, BackendModel, Vocab
from slm_core.types import AdapterInfo, ContextOptions, KvType, ModelInfo, ModelOptions, ModelSource


class Server:
    """Answers the calls of an ``IsolatedModel`` and an ``IsolatedVocab``.

    Args:
        control: the connection for them.
    """

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._model: BackendModel | None = None
        self._calls: dict[str, Callable[..., object]] = {
            "load": self._load,
            "new_context": self._new_context,
            "load_adapter": self._load_adapter,
            "unload_adapter": lambda name: self._loaded.adapters.unload(name),
            "close": lambda: self._loaded.close(),
            "encode": self._encode,
            "decode_text": lambda ids, special: self._loaded.vocab.decode(ids, special=special),
            "token_block": self._token_block,
        }

    def serve(self) -> None:
        """Answer calls until the model is closed, or the connection ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                call, *arguments = self._control.receive()
                self._control.send(pack(self._answer(call, arguments)))
                if call == "close":
                    return

    @property
    def _loaded(self) -> BackendModel:
        assert self._model is not None, "the first call is load"
        return self._model

    def _answer(self, call: str, arguments: list[Any]) -> list[object]:
        try:
            return ["ok", self._calls[call](*arguments)]
        except EOFError:
            raise
        except BaseException as error:  # raised again in the parent
            return ["error", described(error)]

    def _load(self, target: str, source: ModelSource, options: dict[str, Any]) -> object:
        progress = self._progress if options["has_progress"] else None
        backend_options = options["backend_options"]
        loading = ModelOptions(options["device"], options["n_threads"], progress, backend_options)
        self._model = _backend(target).load(source, loading)
        return {"info": _info(self._model.info), "vocab": _vocab(self._model.vocab)}

    def _load_adapter(self, path: Path, name: str | None, layers: list[int] | None) -> object:
        of_layers = None if layers is None else (layers[0], layers[1])
        return _adapter(self._loaded.adapters.load(path, name, layers=of_layers))

    def _progress(self, share: float) -> None:
        self._control.send(pack(["progress", share]))
        self._control.receive()

    def _new_context(self, options: dict[str, Any]) -> object:
        connection, file = self._control.receive_files(2)
        channel = Channel(socket.socket(fileno=connection))
        try:
            rows = SharedRows(file)
            os.close(file)
            kv_types = {name: options[name] and KvType(options[name]) for name in ("kv_type_k", "kv_type_v")}
            context = self._loaded.new_context(ContextOptions(**{**options, **kv_types}))
            value = declared(context)
        except BaseException:
            channel.close()
            raise
        threading.Thread(target=ServedContext(context, channel, rows).serve, daemon=True).start()
        return value

    def _encode(self, text: str, add_special: bool, parse_special: bool) -> object:
        ids = self._loaded.vocab.encode(text, add_special=add_special, parse_special=parse_special)
        return np.array(ids, np.int32)

    def _token_block(self, first: int, n: int, special: bool) -> object:
        pieces = [self._loaded.vocab.token_bytes(token, special=special) for token in range(first, first + n)]
        return np.array([len(piece) for piece in pieces], np.int32), b"".join(pieces)


def main(control: str, lifeline: str, level: str) -> None:
    """Serve one model."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(socket.socket(fileno=int(lifeline)))
    logging.basicConfig(level=int(level), format="slm-log %(levelno)02d %(name)s: %(message)s", stream=sys.stderr)
    logging.captureWarnings(True)
    Server(Channel(socket.socket(fileno=int(control)))).serve()
    os._exit(0)


def _end_with_parent(lifeline: socket.socket) -> None:
    """End this process when the parent ends."""

    def wait() -> None:
        select.select([lifeline], [], [])  # Linux sends no SIGIO while a thread waits in recv
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    if sys.platform == "linux":
        # Native code may hold the GIL forever. The default action of SIGIO ends the process on Linux.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _backend(target: str) -> Backend:
    module, _, attribute = target.partition(":")
    try:
        return cast("Backend", getattr(importlib.import_module(module), attribute)())
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"{target} cannot be imported in the process of an isolated model: {error}") from error


def _adapter(info: AdapterInfo) -> dict[str, object]:
    values = {field.name: getattr(info, field.name) for field in fields(info)}
    return {**values, "tensors": list(info.tensors), "layers": list(info.layers)}


def _info(info: ModelInfo) -> dict[str, object]:
    values = {field.name: getattr(info, field.name) for field in fields(info)}
    return {**values, "chat_templates": dict(info.chat_templates), "settings": dict(info.settings)}


def _vocab(vocab: Vocab) -> dict[str, object]:
    eog_ids = np.array(sorted(vocab.eog_ids), np.int32)
    infill = None if vocab.infill is None else list(astuple(vocab.infill))
    return {"size": vocab.size, "bos": vocab.bos, "eos": vocab.eos, "eog_ids": eog_ids, "infill": infill}


if __name__ == "__main__":
    main(*sys.argv[1:])
