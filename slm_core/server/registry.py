"""The models of a server: their names, and loading them when they are needed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from slm_core.engine import Engine, Reuse
from slm_core.errors import InvalidOption
from slm_core.loading import Model
from slm_core.server.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Options of each model's engine; see ``Model.engine``."""

    n_ctx: int = 32768
    n_batch: int = 512
    n_parallel: int = 16
    step_ms: float = 100
    aging_s: float = 10
    prefix_cache: bool = True
    reuse: Reuse = "prefix"
    swap_bytes: int = 1 << 30
    cache_dir: Path | None = None
    cache_dir_bytes: int = 4 << 30

    def start(self, model: Model) -> Engine:
        """An engine with these options."""
        directory = None if self.cache_dir is None else self.cache_dir / model.info.fingerprint[:16]
        return model.engine(
            n_ctx=self.n_ctx,
            n_batch=self.n_batch,
            n_parallel=self.n_parallel,
            step_ms=self.step_ms,
            aging_s=self.aging_s,
            prefix_cache=self.prefix_cache,
            reuse=self.reuse,
            swap_bytes=self.swap_bytes,
            cache_dir=directory,
            cache_dir_bytes=self.cache_dir_bytes,
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be requested by name.

    Attributes:
        name: its name in the API.
        load: loads it.
        aliases: other names of it.
        settings: the options of its engine.
    """

    name: str
    load: Callable[[], Model]
    aliases: tuple[str, ...] = ()
    settings: EngineSettings = field(default_factory=EngineSettings)


class Running:
    """A loaded model with its engine.

    Attributes:
        name: its name in the API.
        model: the model.
        engine: its engine.
        embedding: held while embeddings are computed: one group of texts at a time.
    """

    def __init__(self, served: ServedModel) -> None:
        self.name = served.name
        self.embedding = anyio.Lock()
        self.model = served.load()
        try:
            self.engine = served.settings.start(self.model)
        except BaseException:
            self.model.close()
            raise

    def close(self) -> None:
        """Close the engine and the model."""
        self.engine.close()
        self.model.close()


class ModelRegistry:
    """The models of a server. A model is loaded with its first request, one model at a time.

    Args:
        models: the models; the first one is the default.

    Attributes:
        started: the time of the start, in seconds since 1970.

    Raises:
        InvalidOption: no models, or two models with one name.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        names = [name for model in models for name in (model.name, *model.aliases)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not models or twice:
            raise InvalidOption(f"two models have the name {twice[0]!r}" if twice else "there are no models to serve")
        self.models: Mapping[str, ServedModel] = {model.name: model for model in models}
        self.started = int(time.time())
        self._default = models[0]
        self._by_name = {name: model for model in models for name in (model.name, *model.aliases)}
        self._running: dict[str, Running] = {}
        self._loading = anyio.Lock()

    @property
    def running(self) -> Sequence[Running]:
        """The loaded models."""
        return tuple(self._running.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of a name or alias; None for the default.

        Raises:
            ApiError: there is none.
        """
        model = self._default if name is None else self._by_name.get(name)
        if model is None:
            message = f"there is no model {name!r:.100} (there are: {', '.join(self._by_name)})"
            raise ApiError(404, message, "model_not_found", "model")
        return model

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Running]:
        """A loaded model, which stays loaded within the block.

        Raises:
            ApiError: there is no such model.
        """
        served = self.find(name)
        async with self._loading:
            if served.name not in self._running:
                with anyio.CancelScope(shield=True):  # a load cannot be interrupted, and must not be lost
                    self._running[served.name] = await to_thread.run_sync(Running, served)
            running = self._running[served.name]
        yield running

    async def close(self) -> None:
        """Close all models."""
        running, self._running = self._running, {}
        with anyio.CancelScope(shield=True):
            for each in running.values():
                await to_thread.run_sync(each.close)
