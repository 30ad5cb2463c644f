"""The parent's side of the adapters of an isolated model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from slm_core.adapters import check_layer_range, unknown_adapter
from slm_core.isolation.control import Control
from slm_core.paths import model_file
from slm_core.types import AdapterInfo


class IsolatedAdapters(Mapping[str, AdapterInfo]):
    """Adapters that are loaded in the model's process; see ``protocols.Adapters``.

    Args:
        control: the calls to the process.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._infos: dict[str, AdapterInfo] = {}

    def __getitem__(self, name: str) -> AdapterInfo:
        try:
            return self._infos[name]
        except (KeyError, TypeError):
            raise unknown_adapter(name, self) from None

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._infos))

    def __len__(self) -> int:
        return len(self._infos)

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Load an adapter; see ``protocols.Adapters``."""
        layers = check_layer_range(layers)
        value = self._control.ask("load_adapter", model_file(path).absolute(), name, layers and list(layers))
        match value:
            case {
                "name": str() as known,
                "path": Path() as source,
                "fingerprint": str() as fingerprint,
                "rank": int() as rank,
                "n_params": int() as n_params,
                "tensors": list() as tensors,
                "layers": list() as of_layers,
            } if all(isinstance(tensor, str) for tensor in tensors) and all(isinstance(i, int) for i in of_layers):
                changed = tuple(tensors), tuple(of_layers)
                self._infos[known] = AdapterInfo(known, source, fingerprint, rank, n_params, *changed)
                return self._infos[known]
        raise self._control.garbled("load_adapter")

    def unload(self, name: str) -> None:
        """Forget an adapter; see ``protocols.Adapters``."""
        self._control.ask("unload_adapter", name)
        self._infos.pop(name, None)
