"""The adapters that are loaded for a model, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from slm_core.adapters.adapter import Adapter, AdapterSet, AdapterUse
from slm_core.adapters.base_model import BaseModel
from slm_core.adapters.reading import read_adapter
from slm_core.argument_checks import check_kind
from slm_core.errors import InvalidOption, SnapshotMismatch, UnsupportedInput
from slm_core.hints import did_you_mean
from slm_core.paths import model_file
from slm_core.protocols import Adapters
from slm_core.types import AdapterInfo

MAX_SCALE = 1e6
"""The largest scale of an adapter: with larger ones, products of finite numbers would not be finite in float32."""


def check_scales(scales: object, loaded: Adapters) -> None:
    """Check adapters by name, with their scales.

    Raises:
        InvalidOption: an unknown name, or a scale that is not a number from -1e6 to 1e6.
    """
    if not isinstance(scales, Mapping):
        raise InvalidOption(f"adapters={repr(scales)[:80]} (accepted: names with their scales)")
    for name, scale in scales.items():
        loaded[name]
        check_scale(name, scale)


def check_scale(name: str, scale: object) -> None:
    """Check the scale of an adapter.

    Raises:
        InvalidOption: it is not a number from -1e6 to 1e6.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= MAX_SCALE:
        raise InvalidOption(f"the scale of adapter {name!r} is {repr(scale)[:80]} (accepted: -1e6 to 1e6)")


def unknown_adapter(name: object, loaded: Collection[str]) -> InvalidOption:
    """The error for a name that no loaded adapter has."""
    return InvalidOption(
        f"unknown adapter {name!r:.80} (loaded: {', '.join(loaded) or 'none'}{did_you_mean(name, loaded)})"
    )


class LoadedAdapters(Mapping[str, AdapterInfo]):
    """``protocols.Adapters`` for a backend. Threads may share it.

    Args:
        base: reads the properties of the model; None if the backend takes no adapters for this model.
        prepare: prepares an adapter for the engine; raises ``UnsupportedModel`` if the engine cannot compute it.
        reason: why there are none, for messages.
    """

    def __init__(
        self,
        base: BaseModel | None,
        prepare: Callable[[Adapter], None] = lambda _: None,
        reason: str = "",
    ) -> None:
        self._base = base
        self._prepare = prepare
        self._reason = reason
        self._adapters: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> AdapterInfo:
        return self._named(name).info

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._adapters))

    def __len__(self) -> int:
        return len(self._adapters)

    def __repr__(self) -> str:
        return f"<Adapters: {', '.join(self._adapters) or 'none'}>"

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Load an adapter; see ``protocols.Adapters``."""
        if self._base is None:
            raise UnsupportedInput(f"this model takes no adapters: {self._reason}")
        check_kind("name", name, str)
        adapter = read_adapter(model_file(path), self._base, name, layers)
        with self._lock:
            if adapter.info.name in self._adapters:
                raise InvalidOption(
                    f"there is an adapter {adapter.info.name!r} already: choose another name, or unload it"
                )
            self._prepare(adapter)
            self._adapters[adapter.info.name] = adapter
        return adapter.info

    def unload(self, name: str) -> None:
        """Forget an adapter; see ``protocols.Adapters``."""
        with self._lock:
            del self._adapters[self._named(name).info.name]

    def clear(self) -> None:
        """Forget all adapters; the model is closed."""
        self._adapters.clear()

    def set_of(self, scales: Mapping[str, float]) -> AdapterSet:
        """The adapters of these names with their scales, sorted by name; a scale of 0 is left out.

        Raises:
            InvalidOption: an unknown name, or a scale that is not a number from -1e6 to 1e6.
        """
        check_scales(scales, self)
        return tuple(AdapterUse(self._named(name), float(scales[name])) for name in sorted(scales) if scales[name])

    def of_dump(self, dumped: Mapping[str, float]) -> AdapterSet:
        """The adapters of a dump, by their fingerprints.

        Raises:
            SnapshotMismatch: one is not loaded.
        """
        by_fingerprint = {adapter.info.fingerprint: adapter for adapter in list(self._adapters.values())}
        for fingerprint in dumped:
            if fingerprint not in by_fingerprint:
                raise SnapshotMismatch(
                    f"the dump was made with an adapter that is not loaded (fingerprint {fingerprint[:12]}...): load it"
                )
        uses = (AdapterUse(by_fingerprint[fingerprint], scale) for fingerprint, scale in dumped.items())
        return tuple(sorted(uses, key=lambda use: use.adapter.info.name))

    def _named(self, name: str) -> Adapter:
        try:
            return self._adapters[name]
        except (KeyError, TypeError):
            raise unknown_adapter(name, self) from None
