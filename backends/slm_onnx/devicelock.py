"""Calls of contexts that use a device, one at a time where the device needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Locked(Protocol):
    """What has a device's lock (``Provider.lock``)."""

    _device_lock: AbstractContextManager[object]


_S = TypeVar("_S", bound=Locked)


def on_device(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A method that holds the device's lock while it runs."""

    @functools.wraps(method)
    def locked(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._device_lock:
            return method(self, *args, **kwargs)

    return locked
