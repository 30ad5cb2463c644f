"""The objects that all scenarios of one adopting module share: model files, loaded models, references, tolerances."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.oracle.adapters import (
    RandomAdapter,
    adapter_name,
    control_vector_name,
    merged,
    random_adapter,
    random_control_vector,
    usual_matrices,
)
from slm_conformance.oracle.factories import FAMILIES, Shape, TinyModel, WeightType, make_tiny_model
from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import SMALL, STATES
from slm_conformance.oracle.state_reference import read_states
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite import child
from slm_conformance.suite.spec import make_backend
from slm_conformance.suite.tolerance import KV_LEVELS, Precision, Tolerance, exact_sample, random_tokens
from slm_core.errors import InvalidOption, SlmError, UnsupportedModel
from slm_core.loading import demo_model_path
from slm_core.protocols import BackendModel
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, ModelOptions, ModelSource, Progress

Rows = NDArray[np.floating]

N_OTHER_PROCESS = 40  # tokens
_KV_BLOCK = 32  # numbers; for KV types with blocks, the head width must be a multiple of it


@dataclass(frozen=True, slots=True)
class Source:
    """A model file under test.

    Attributes:
        path: the file.
        weights: its weights; None if the reference cannot run them.
        weight_type: the key of ``BackendFixtures.precision``.
    """

    path: Path
    weights: Weights | None
    weight_type: str


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort for random searches.

    Attributes:
        seconds: additional time for random programs of each model.
        first_seed: seed of the first of them; each further one has the next seed.
        quick: a first look: few programs, one model, no slow scenario.
    """

    seconds: float = 0
    first_seed: int = 0
    quick: bool = False


class Workshop:
    """Everything of one adopting module that several scenarios share: files, loaded models, tolerances.

    Args:
        fixtures: the adopter's options.
        directory: the folder for tiny models.
        effort: effort for random searches.
    """

    def __init__(self, fixtures: BackendFixtures, directory: Path, effort: Effort | None = None) -> None:
        self.fixtures = fixtures
        self.effort = effort or Effort()
        self.directory = directory
        self.backend = make_backend(fixtures.backend, isolated=fixtures.isolated)
        self._models: dict[str, BackendModel] = {}
        self._sources: dict[str, Source] = {}
        # The caches are in the instance: a cache of the class would keep all workshops, and their models, alive.
        self.tolerance = functools.cache(self._tolerance)
        self.kv_types = functools.cache(self._kv_types)
        self.declared = functools.cache(self._declared)
        self.expected = functools.cache(self._expected)
        self.adapter = functools.cache(self._adapter)
        self.control_vector = functools.cache(self._control_vector)
        self.adapted = functools.cache(self._adapted)
        self.other_process = functools.cache(self._other_process)

    @functools.cached_property
    def absence(self) -> str | None:
        """Why the backend is not installed; None if it is."""
        status = self.backend.status()
        return None if status.installed else f"backend {status.name!r} is not installed: {status.reason}"

    def share(self, usual: int) -> int:
        """The number of tries: ``usual`` times ``BackendFixtures.volume``, rounded, at least 1."""
        return max(1, round(usual * self.fixtures.volume))

    def source(self, name: str) -> Source:
        """The file of a model by name; written on first use."""
        if name not in self._sources:
            self._sources[name] = self._make_source(name)
        return self._sources[name]

    def model(self, name: str) -> BackendModel:
        """The loaded model; loaded once."""
        options = self.options()  # may have loaded the first model
        if name not in self._models:
            self._models[name] = self._load(self.source(name).path, options)
        return self._models[name]

    def refusal(self, name: str) -> str | None:
        """Why the backend cannot run a model; None if it can, or must because the adopter names the model."""
        if name in vars(type(self.fixtures)).get("models", ()):
            return None
        support = self.backend.supports(self.source(name).path, self.fixtures.device)
        return None if support.supported else support.reason

    def load(self, source: ModelSource) -> BackendModel:
        """Load a file again, or another source, with the adopter's options."""
        return self._load(source, self.options())

    def _load(self, source: ModelSource, options: ModelOptions) -> BackendModel:
        try:
            return self.backend.load(source, options)
        except SlmError:
            raise
        except Exception as error:
            error.add_note(
                f"load() of {self.backend.name} raised no error of slm_core.errors: UnsupportedModel if the engine"
                " cannot run the model (then supports() has to say no, too), InvalidModelFile if the file is damaged"
            )
            raise

    def options(self, progress: Progress | None = None) -> ModelOptions:
        """The adopter's load options."""
        return dataclasses.replace(self._options(self.n_threads), progress=progress)

    @functools.cached_property
    def n_threads(self) -> int | None:
        """The argument of ``load``: see ``BackendFixtures.n_threads``."""
        n_threads = self.fixtures.n_threads
        if n_threads != "one":
            return n_threads
        first = self.fixtures.models[0]
        try:
            self._models[first] = self._load(self.source(first).path, self._options(1))
        except InvalidOption:
            return None
        return 1

    def _options(self, n_threads: int | None) -> ModelOptions:
        fixtures = self.fixtures
        return ModelOptions(fixtures.device, n_threads, None, fixtures.load_options)

    def _tolerance(self, name: str, kv_type: KvType) -> Tolerance:
        """The allowed error of a model's logits."""
        return self.tolerance_of(self.source(name).weights, name, kv_type)

    def _kv_types(self, name: str) -> tuple[KvType, ...]:
        """The KV types for a model: the adopter's types that fit the heads, or all accepted types."""
        weights = self.source(name).weights
        fits = weights is None or weights.shape.head_dim % _KV_BLOCK == 0
        named = [KvType(kv_type) for kv_type in self.fixtures.kv_types]
        if named:
            return tuple(kv_type for kv_type in named if fits or kv_type not in KV_LEVELS)
        accepted = tuple(kv_type for kv_type in KvType if self._accepts_kv_type(name, kv_type))
        assert accepted, f"{self.backend.name} refuses every KV type: {', '.join(KvType)}"
        return accepted

    def _declared(self, name: str) -> tuple[EditLevel, frozenset[Capability]]:
        """The edit level and capabilities of a model's contexts."""
        kv_type = self.kv_types(name)[0]
        with self.model(name).new_context(ContextOptions(64, 1, 16, kv_type, kv_type)) as context:
            return context.edit_level, context.capabilities

    def _expected(self, name: str, seed: int) -> Rows:
        """The reference's logits after each token of a sample, float64 [N_SAMPLE, V]."""
        weights = self.source(name).weights
        assert weights is not None, f"no reference for {name}"
        return exact_sample(weights, seed)[1]

    def _other_process(self, name: str) -> child.OtherProcess:
        """A process that decoded the first 40 random tokens of a model, with the adopter's options."""
        return child.run(
            {
                "backend": self.fixtures.backend,
                "isolated": self.fixtures.isolated,
                "path": str(self.source(name).path),
                "device": self.fixtures.device,
                "n_threads": self.n_threads,
                "load_options": dict(self.fixtures.load_options),
                "kv_type": self.kv_types(name)[0],
                "tokens": list(random_tokens(self.model(name).info.n_vocab, N_OTHER_PROCESS)),
            }
        )

    def _adapter(self, name: str, seed: int) -> RandomAdapter:
        """A random adapter of a model, loaded under the name ``adapter_name(seed)``."""
        weights = self.source(name).weights
        assert weights is not None, f"no reference for {name}"
        path = self.directory / f"{name.replace('/', '-')}-adapter-{seed}.gguf"
        matrices = usual_matrices(weights)
        adapter = random_adapter(path, self.model(name).info.architecture, weights, matrices, seed)
        if matrices:
            self.model(name).adapters.load(adapter.path, adapter_name(seed))
        return adapter

    def _control_vector(self, name: str, seed: int) -> RandomAdapter:
        """A random control vector of a model, loaded under the name ``control_vector_name(seed)``.

        Raises:
            UnsupportedModel: the backend refuses it.
        """
        weights = self.source(name).weights
        assert weights is not None, f"no reference for {name}"
        vector = random_control_vector(self.directory / f"{name.replace('/', '-')}-vector-{seed}.gguf", weights, seed)
        self.model(name).adapters.load(vector.path, control_vector_name(seed))
        return vector

    def _adapted(self, name: str, kv_type: KvType, *parts: tuple[RandomAdapter, float]) -> tuple[Weights, Tolerance]:
        """A model with adapters, each with its scale, added to its weights, and the tolerances of its logits."""
        source = self.source(name)
        assert source.weights is not None, f"no reference for {name}"
        weights = merged(source.weights, *parts)
        return weights, self.tolerance_of(weights, name, kv_type)

    def tolerance_of(self, weights: Weights | None, name: str, kv_type: KvType) -> Tolerance:
        """The allowed error of logits of these weights in a model's file."""
        precision = self.fixtures.precision.get(self.source(name).weight_type, Precision.QUANTIZED)
        return Tolerance(weights, Precision(precision), kv_type)

    def close(self) -> None:
        """Close the models."""
        for model in self._models.values():
            model.close()

    def _accepts_kv_type(self, name: str, kv_type: KvType) -> bool:
        try:
            self.model(name).new_context(ContextOptions(64, 1, 16, kv_type, kv_type)).close()
        except InvalidOption:
            return False
        return True

    def _make_source(self, name: str) -> Source:
        if name == "demo":
            return _read_source(demo_model_path())
        if Path(name).suffix == ".gguf":
            return _read_source(Path(name))
        kind, _, family = name.partition("+")
        architecture, weight_type, *calm = kind.split("-")
        if architecture in SMALL:
            path = family_model(self.directory, architecture)
            return Source(path, read_states(path) if architecture in STATES else None, "f32")
        controls = FAMILIES[family] if family else ()
        shape = cast("Shape", architecture), cast("WeightType", weight_type)
        model, weights = _tiny_model(*shape, bool(calm), controls)
        return Source(model.write(self.directory / f"{name}.gguf"), weights, weight_type)


@functools.lru_cache(maxsize=16)
def _tiny_model(
    architecture: Shape, weight_type: WeightType, calm: bool, controls: tuple[str, ...]
) -> tuple[TinyModel, Weights]:
    """A tiny model and its weights. Tolerances are cached by weights, so all workshops of a process share them."""
    model = make_tiny_model(architecture, weight_type, calm=calm, controls=controls)
    return model, Weights.of(model)


def _read_source(path: Path) -> Source:
    try:
        weights = Weights.read(path)
    except UnsupportedModel:
        return Source(path, None, "unknown")
    return Source(path, weights, weights.main_type)
