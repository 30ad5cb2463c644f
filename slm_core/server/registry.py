"""The models of a server: their names, loading them when they are needed, and unloading them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from slm_core.engine import Conversation, Engine, Reuse
from slm_core.engine.prompts import encode
from slm_core.errors import EngineClosed, InvalidOption, SlmError
from slm_core.model import Model
from slm_core.server.checks import check_texts
from slm_core.server.errors import ApiError
from slm_core.types import KvType

_MOST_CRASHES = 3
"""After this many crashes without an answer between them, a model is loaded again only for its next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Options of each model's engine; see ``Model.engine``.

    Attributes:
        lookup: whether answers have prompt lookup (docs/speculation.md), while it pays. None: those that are drawn
            without a seed.
    """

    n_ctx: int = 32768
    n_batch: int = 512
    kv_type_k: KvType | None = None
    kv_type_v: KvType | None = None
    n_parallel: int = 16
    step_ms: float = 100
    aging_s: float = 10
    prefix_cache: bool = True
    reuse: Reuse = "prefix"
    swap_bytes: int = 1 << 30
    cache_dir: Path | None = None
    cache_dir_bytes: int = 4 << 30
    lookup: bool | None = None

    def start(self, model: Model) -> Engine:
        """An engine with these options."""
        directory = None if self.cache_dir is None else self.cache_dir / model.info.fingerprint[:16]
        return model.engine(
            n_ctx=self.n_ctx,
            n_batch=self.n_batch,
            kv_type_k=self.kv_type_k,
            kv_type_v=self.kv_type_v,
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
class ServedAdapter:
    """An adapter (LoRA, control vector) of a served model: requests choose it by its name, in place of the model's.

    Attributes:
        name: its name in the API.
        path: a GGUF file, or a directory of PEFT.
        scale: the factor of its changes.
        layers: the first and the last layer of a control vector; None for all layers with a direction.
    """

    name: str
    path: Path
    scale: float = 1.0
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be requested by name.

    Attributes:
        name: its name in the API.
        load: loads it.
        aliases: other names of it.
        settings: the options of its engine.
        n_bytes: the memory of its weights and its KV cache, in bytes, for the memory budget; 0 if it is unknown.
        adapters: its adapters, which are loaded with it.

    Raises:
        InvalidOption: the aliases are not a collection of texts.
    """

    name: str
    load: Callable[[], Model]
    aliases: tuple[str, ...] = ()
    settings: EngineSettings = field(default_factory=EngineSettings)
    n_bytes: int = 0
    adapters: tuple[ServedAdapter, ...] = ()

    def __post_init__(self) -> None:
        check_texts("aliases", self.aliases)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters, without aliases."""
        return (self.name, *(adapter.name for adapter in self.adapters))


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """The model and the adapters that a name refers to.

    Attributes:
        name: the name of the model, or of its adapter, in the API; an alias stands for its model.
        served: the model.
        adapters: the scale of the adapter, by its name; empty without one.
    """

    name: str
    served: ServedModel
    adapters: Mapping[str, float] = field(default_factory=dict)

    @property
    def parent(self) -> str | None:
        """The name of an adapter's model; None for a model."""
        return self.served.name if self.adapters else None


class Running:
    """A loaded model with its engine.

    Attributes:
        name: its name in the API.
        model: the model.
        engine: its engine.
        apart: a lock for computations in a separate context, outside the engine: one at a time.
    """

    def __init__(self, served: ServedModel) -> None:
        self.name = served.name
        self.apart = anyio.Lock()
        self.model = served.load()
        try:
            for adapter in served.adapters:
                self.model.adapters.load(adapter.path, adapter.name, layers=adapter.layers)
            self.engine = served.settings.start(self.model)
        except BaseException:
            self.model.close()
            raise

    @property
    def has_failed(self) -> bool:
        """Whether its process has crashed, or its engine ended by an error."""
        crashed = self.model.crashed
        return self.engine.ended.done() or (crashed is not None and crashed.done())

    def close(self) -> None:
        """Close the engine and the model."""
        self.engine.close()
        self.model.close()


class Leased:
    """A loaded model, for a request that asked for it or for one of its adapters.

    Attributes:
        name: the name of the model or the adapter in the API.
        adapters: the adapters of the request by name, with their scales.
        model: the model.
        engine: its engine.
        apart: see ``Running``.
        lookup: see ``EngineSettings``.
    """

    def __init__(self, entry: RegistryEntry, running: Running) -> None:
        self.name = entry.name
        self.adapters = entry.adapters
        self.model = running.model
        self.engine = running.engine
        self.apart = running.apart
        self.lookup = entry.served.settings.lookup

    async def tokens(self, conversation: Conversation) -> Sequence[int]:
        """The tokens of a conversation's prompt."""
        model = self.model
        prompt = await to_thread.run_sync(lambda: encode(model.vocab, lambda: model.formatter, conversation, None))
        return prompt.tokens


@dataclass(slots=True, eq=False)
class _Place:
    """The state of a model: whether it is loaded, and the number of its users.

    Attributes:
        served: the model.
        running: the loaded model; None if it is not loaded.
        n_leases: requests that use it.
        used: the time at which the last request ended, in seconds of the registry's clock.
        is_draining: whether it will be unloaded as soon as no request uses it: new requests wait.
        n_crashes: crashes since the last request that ended without one.
    """

    served: ServedModel
    running: Running | None = None
    n_leases: int = 0
    used: float = 0.0
    is_draining: bool = False
    n_crashes: int = 0


class ModelRegistry:
    """The models of a server. A model is loaded with its first request, one model at a time.

    If the memory budget has no room for it, the least recently used models are unloaded, each after its requests.
    A model whose process crashed is loaded again at once.

    Args:
        models: the models; the first one is the default.
        memory_bytes: the memory of all loaded models together, in bytes; None for no limit.
        keep_alive_s: seconds without requests after which a model is unloaded; None for never.
        clock: the clock of ``keep_alive_s``, in seconds.

    Attributes:
        models: the models by name.
        started: the time of the start, in seconds since 1970.

    Raises:
        InvalidOption: no models, two models or adapters with one name, or a model larger than ``memory_bytes``.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        memory_bytes: int | None = None,
        keep_alive_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        every = [item for model in models for item in _names(model)]
        names = [name for name, _ in every]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not models or twice:
            raise InvalidOption(f"two models have the name {twice[0]!r}" if twice else "there are no models to serve")
        for model in models:
            if memory_bytes is not None and model.n_bytes > memory_bytes:
                raise InvalidOption(
                    f"the model {model.name!r} needs about {model.n_bytes / 2**30:.2f} GiB with its KV cache, but the"
                    f" memory budget is {memory_bytes / 2**30:.2f} GiB"
                )
        self.models: Mapping[str, ServedModel] = {model.name: model for model in models}
        self.started = int(time.time())
        self._default = RegistryEntry(models[0].name, models[0])
        self._by_name = dict(every)
        self._places = {model.name: _Place(model) for model in models}
        self._memory_bytes = memory_bytes
        self._keep_alive_s = keep_alive_s
        self._clock = clock
        self._loading = anyio.Lock()
        self._released = anyio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def running(self) -> Sequence[Running]:
        """The loaded models."""
        return tuple(place.running for place in self._places.values() if place.running is not None)

    @property
    def restarting(self) -> Sequence[str]:
        """The models that crashed and are loaded again now."""
        return tuple(name for name, place in self._places.items() if place.n_crashes and place.running is None)

    def find(self, name: str | None) -> RegistryEntry:
        """The model and the adapters of a name or alias; None for the default model.

        Raises:
            ApiError: there is none.
        """
        entry = self._default if name is None else self._by_name.get(name)
        if entry is None:
            message = f"there is no model {name!r:.100} (there are: {', '.join(self._by_name)})"
            raise ApiError(404, message, "model_not_found", "model")
        return entry

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Leased]:
        """The loaded model of a name, which stays loaded within the block.

        Raises:
            ApiError: there is no such model, or it cannot be loaded.
            EngineClosed: the registry is closed.
        """
        entry = self.find(name)
        place = self._places[entry.served.name]
        running = await self._acquire(place)
        try:
            yield Leased(entry, running)
        finally:
            place.n_leases -= 1
            place.used = self._clock()
            place.n_crashes = place.n_crashes if running.has_failed else 0
            self._wake()
            if not place.n_leases and self._keep_alive_s is not None:
                asyncio.get_running_loop().call_later(self._keep_alive_s, self._start, self.unload_idle)

    async def unload(self, name: str) -> None:
        """Unload a model after its requests; new requests wait, and load it again.

        Raises:
            ApiError: there is no such model.
        """
        place = self._places[self.find(name).served.name]
        async with self._loading:
            await self._drain(place)

    async def unload_idle(self) -> None:
        """Unload the models that had no request for ``keep_alive_s`` seconds."""
        async with self._loading:
            for place in self._places.values():
                idle_s = self._clock() - place.used
                if not place.n_leases and self._keep_alive_s is not None and idle_s >= self._keep_alive_s:
                    await self._drain(place)

    async def close(self) -> None:
        """Close all models: answers that are not over end with ``EngineClosed``, and no model is loaded any more."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        with anyio.CancelScope(shield=True):
            for place in self._places.values():
                await self._close(place)

    async def _acquire(self, place: _Place) -> Running:
        if place.running is None or place.is_draining or place.running.has_failed:
            async with self._loading:
                if place.running is not None and place.running.has_failed:
                    await self._close(place)
                if place.running is None:
                    await self._make_room(place.served)
                    with anyio.CancelScope(shield=True):  # a load cannot be interrupted, and must not be lost
                        await self._load(place)
                place.n_leases += 1
        else:
            place.n_leases += 1
        assert place.running is not None
        return place.running

    async def _load(self, place: _Place) -> None:
        self._check_open()
        try:
            running = await to_thread.run_sync(Running, place.served)
        except SlmError as error:
            message = f"the model {place.served.name!r} cannot be loaded: {error}"
            raise ApiError(503, message, "model_load_failed", "model") from error
        if self._is_closed:
            await to_thread.run_sync(running.close)
            self._check_open()
        place.running, place.used = running, self._clock()
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._start, self._reload, place, running)

        running.engine.ended.add_done_callback(ended)
        if running.model.crashed is not None:
            running.model.crashed.add_done_callback(ended)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the server stops")

    async def _reload(self, place: _Place, failed: Running) -> None:
        """Load a model again whose process crashed; after ``_MOST_CRASHES`` crashes, leave that to its next request."""
        if place.running is failed and place.n_crashes < _MOST_CRASHES:
            place.n_crashes += 1
            await self._acquire(place)
            place.n_leases -= 1
            self._wake()

    async def _make_room(self, served: ServedModel) -> None:
        """Unload the least recently used models until there is memory for ``served``."""
        while self._memory_bytes is not None:
            loaded = [place for place in self._places.values() if place.running is not None]
            if sum(place.served.n_bytes for place in loaded) + served.n_bytes <= self._memory_bytes or not loaded:
                return
            await self._drain(min(loaded, key=lambda place: (place.n_leases > 0, place.used)))

    async def _drain(self, place: _Place) -> None:
        """Unload a model after its requests. The caller holds the lock ``_loading``."""
        place.is_draining = True
        try:
            while place.n_leases:
                await self._released.wait()
            with anyio.CancelScope(shield=True):
                await self._close(place)
        finally:
            place.is_draining = False

    async def _close(self, place: _Place) -> None:
        running, place.running = place.running, None
        if running is not None:
            await to_thread.run_sync(running.close)

    def _wake(self) -> None:
        released, self._released = self._released, anyio.Event()
        released.set()

    def _start(self, work: Callable[..., Coroutine[None, None, None]], *arguments: object) -> None:
        """Do work in a task, unless the registry is closed. A failed load is dropped: the next request loads again."""
        if self._is_closed:
            return

        async def run() -> None:
            with suppress(ApiError, EngineClosed):
                await work(*arguments)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _names(model: ServedModel) -> Iterator[tuple[str, RegistryEntry]]:
    """All names of a model and of its adapters, with their targets."""
    for name in (model.name, *model.aliases):
        yield name, RegistryEntry(model.name, model)
    for adapter in model.adapters:
        yield adapter.name, RegistryEntry(adapter.name, model, {adapter.name: adapter.scale})
