"""The environment of workloads: models, contexts that live as long as the run, and fresh ones for comparison."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from slm_conformance.fixtures import DEFAULT_MODELS, BackendFixtures
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.spec import make_backend
from slm_conformance.suite.workshop import Workshop
from slm_core.chat import Chat, Session
from slm_core.formatting import formatter
from slm_core.model import Model
from slm_core.protocols import Context
from slm_core.types import ContextOptions

MODELS = (*DEFAULT_MODELS, "demo")
N_CTX, N_SEQ_MAX, N_BATCH = 512, 8, 64
QUESTIONS = (
    "My dog is called Rex.",
    "What is my dog called?",
    "What is 12 + 30?",
    "My name is Ada.",
    "What is my name?",
    "Spell the word cat.",
    "I live in Oslo.",
    "Where do I live?",
)


@dataclass(frozen=True, slots=True)
class Engine:
    """Options for loading models.

    Attributes:
        backend: a registered name, or "package.module:attribute".
        device: passed to ``load``.
        n_threads: passed to ``load``.
    """

    backend: str
    device: str = "cpu"
    n_threads: int = 1

    @property
    def load_options(self) -> Mapping[str, object]:
        """Load options; they enable the disk cache even for small models, if the backend has one."""
        return {"cache": True} if "cache" in make_backend(self.backend).load_options else {}

    def fixtures(self) -> BackendFixtures:
        """The same options as fixtures of the conformance suite, whose tools the workloads use."""

        class Fixtures(BackendFixtures):
            backend: ClassVar[str] = self.backend
            device: ClassVar[str] = self.device
            n_threads: ClassVar[int | None] = self.n_threads
            load_options: ClassVar[Mapping[str, object]] = self.load_options

        return Fixtures()


@dataclass(slots=True)
class Site:
    """The environment of one run.

    Attributes:
        engine: options for loading models.
        folder: folder for files; its creator empties it.
        workshop: models and tolerances.
        counts: other counts of workloads, by name.
        kept: state that a workload keeps between rounds, by name of the workload.
        contexts: one context per model, which lives as long as the run.
        first_digests: digests of the first run of fixed calls, by model and number of the calls.
    """

    engine: Engine
    folder: Path
    workshop: Workshop
    counts: Counter[str] = field(default_factory=Counter)
    kept: dict[str, object] = field(default_factory=dict)
    contexts: dict[str, Context] = field(default_factory=dict)
    first_digests: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @classmethod
    def open(cls, engine: Engine, folder: Path) -> Site:
        """A site without loaded models."""
        return cls(engine, folder, Workshop(engine.fixtures(), folder))

    def close(self) -> None:
        """Close contexts and models."""
        self.renew()
        self.workshop.close()

    def renew(self) -> None:
        """Drop everything that lives longer than a round; after a failure its state is unknown."""
        for kept in self.kept.values():
            if isinstance(kept, Chat):
                kept.close()
        for context in self.contexts.values():
            context.close()
        self.kept.clear()
        self.contexts.clear()

    def path(self, name: str) -> Path:
        """The file of a model."""
        return self.workshop.source(name).path

    def model(self, name: str) -> Model:
        """A model, loaded once per run."""
        model = self.workshop.model(name)
        return Model(model, formatter(model=model), "named by the caller")

    @contextmanager
    def bench(self, name: str) -> Iterator[Bench]:
        """A ``Bench`` of the conformance suite for a model; its contexts are closed afterwards."""
        with Bench(self.workshop, name) as bench:
            yield bench

    def context(self, name: str) -> Context:
        """The context of a model that lives as long as the run."""
        if name not in self.contexts:
            self.contexts[name] = self.new_context(name)
        return self.contexts[name]

    def new_context(self, name: str, n_ctx: int = N_CTX) -> Context:
        """A fresh context of the same sizes."""
        kv_type = self.workshop.kv_types(name)[0]
        options = ContextOptions(n_ctx, N_SEQ_MAX, N_BATCH, kv_type, kv_type)
        return self.workshop.model(name).new_context(options)

    def old_session(self, name: str) -> Session:
        """A session in the context that lives as long as the run."""
        return Session(self.context(name), self.workshop.model(name).vocab)

    def fresh_session(self, name: str, n_ctx: int = N_CTX) -> Session:
        """A session in a fresh context of its own."""
        return Session(self.new_context(name, n_ctx), self.workshop.model(name).vocab, owns_context=True)

    def prompt(self, name: str, rng: random.Random) -> list[int]:
        """A question for the demo model; for a model with random weights, random tokens."""
        vocab = self.workshop.model(name).vocab
        if name == "demo":
            text = f"<|im_start|>user\n{rng.choice(QUESTIONS)}<|im_end|>\n<|im_start|>assistant\n"
            return list(vocab.encode(text, add_special=True, parse_special=True))
        return self.tokens(name, rng, rng.randint(1, 3 * N_BATCH))

    def tokens(self, name: str, rng: random.Random, n: int) -> list[int]:
        """Random tokens."""
        return rng.choices(range(self.workshop.model(name).vocab.size), k=n)
