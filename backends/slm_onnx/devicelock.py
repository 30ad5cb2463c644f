"""Holds the lock of a device during calls that use it: some devices support only one call at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Locked(Protocol):
    """An object with the lock of a device (``Provider.lock``)."""

    _device_lock: AbstractContextManager[object]


_S = TypeVar("_S", bound=Locked)


def on_device(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A method that holds the device's lock while it runs."""

    @functools.wraps(method)
    def locked(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._device_lock:
            return method(self, *args, **kwargs)

    return locked
