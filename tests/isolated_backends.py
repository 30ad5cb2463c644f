"""Backends for tests of isolated models: the child imports them and goes wrong in one way."""

from __future__ import annotations

import ctypes
import os
import pickle
import struct
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from slm_conformance.toy import ToyBackend
from slm_conformance.toy.context import ToyContext
from slm_core.errors import ContextFull, SlmError
from slm_core.isolation import values
from slm_core.isolation.channel import Channel
from slm_core.isolation.shared_rows import SharedRows
from slm_core.protocols import Batch
from slm_core.types import Logits, ModelOptions, ModelSource
from slm_llamacpp import backend as llamacpp


class SomethingNew(SlmError):
    """An exception class that the parent does not know."""


def _abort() -> None:
    os.write(2, b"loading\nmodel.cpp:7: GGML_ASSERT(n_embd > 0) failed\n/usr/lib/libc.so.6(abort+0x12) [0x7f0012]\n")
    os.abort()


def _raise(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def _sends(data: bytes) -> Callable[[], None]:
    """A fault: every later message of this process is replaced by ``data``."""

    def fault() -> None:
        Channel.send = lambda self, message, deadline=None: self._socket.sendall(data)  # type: ignore[method-assign]

    return fault


def _framed(value: object) -> bytes:
    header, payload = values.pack(value)
    data = b"".join(payload)
    return struct.pack("<IQ", len(header), len(data)) + header + data


def _no_room() -> None:
    """A fault: no rows fit into the shared memory."""
    SharedRows.write = lambda self, rows: False  # type: ignore[method-assign]


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch exploded",)


_FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "abort": _abort,
    "segmentation fault": lambda: ctypes.string_at(8),
    "exit": lambda: os._exit(7),
    "slow": lambda: time.sleep(0.4),
    "hang": lambda: time.sleep(1000),
    "hang with the lock": lambda: ctypes.PyDLL(None).sleep(1000),  # Python's global lock
    "random bytes": _sends(np.random.default_rng(0).bytes(4096)),
    "pickle": _sends(struct.pack("<IQ", len(pickle.dumps(_Bomb())), 0) + pickle.dumps(_Bomb())),
    "another shape": _sends(_framed(["ok", np.zeros((2, 7), np.float32), 3, []])),
    "an array": _sends(_framed([np.zeros(3, np.float32)])),
    "no room": _no_room,
    "narrow rows": lambda: None,
    "other numbers": lambda: None,
    "full": _raise(ContextFull(7, 3, seq_id=2)),
    "something new": _raise(SomethingNew("what nobody knows")),
    "a type error": _raise(TypeError("not a batch")),
}


_CHANGES: dict[str, Callable[[Logits], Any]] = {
    "narrow rows": lambda rows: rows[:, :7],
    "other numbers": lambda rows: rows.astype(np.float64),
}


class FaultyContext(ToyContext):
    """A context that goes wrong when it decodes token 1, in the way that the model was loaded with."""

    def decode(self, batch: Batch) -> Logits:
        if 1 in batch.tokens:
            _FAULTS[FaultyBackend.fault]()
            return _CHANGES.get(FaultyBackend.fault, np.array)(super().decode(batch))
        return super().decode(batch)


class FaultyBackend(ToyBackend):
    """A backend that goes wrong while it loads (``at="load"``), or while it decodes token 1."""

    fault = "none"
    context_type = FaultyContext
    load_options = MappingProxyType({"fault": "a key of _FAULTS", "at": "load or decode"})

    def load(self, source: ModelSource, options: ModelOptions):  # type: ignore[no-untyped-def]
        wanted = options.backend_options
        FaultyBackend.fault = str(wanted["fault"])
        if wanted.get("at") == "load":
            _FAULTS[FaultyBackend.fault]()
        return super().load(source, ModelOptions(options.device, options.n_threads, options.progress))


class UncheckedLlamaCpp(llamacpp.LlamaCppBackend):
    """llama.cpp without the checks of files."""

    def load(self, source: ModelSource, options: ModelOptions):  # type: ignore[no-untyped-def]
        llamacpp.check_source = lambda gguf: None  # type: ignore[assignment]
        return super().load(source, options)
