"""The fixtures class that an adopter of the suite fills in. Light to import, as every pytest run imports it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

DEFAULT_MODELS = ("llama-f32", "qwen2-f16", "qwen3-q8_0")
"""Tiny models that cover each architecture and each weight type."""

FURTHER_MODELS = ("qwen2vl-f32", *(f"small_{kind}-f32" for kind in ("lfm2", "mamba2", "rwkv7", "window", "mla")))
"""Tiny models that cover each kind of memory: M-RoPE, recurrent layers, sliding windows, latent attention."""

COMMAND_LINE = ""
"""The value of ``BackendFixtures.backend`` that stands for the option ``--slm-backend``."""


class BackendFixtures:
    """The backend under test, and how it is tested.

    Adopt the suite with a subclass in a module that imports all scenarios::

        from slm_conformance.fixtures import BackendFixtures
        from slm_conformance.scenarios import *  # noqa: F403


        class Fixtures(BackendFixtures):
            backend = "mine"

    Attributes:
        backend: a registered backend, or "package.module:attribute" for another one; the attribute is called without
            arguments. Scenarios that start another process import it there.
        device: passed to ``load``.
        n_threads: passed to ``load``. "one" (the default) is 1, because more threads slow tiny models down; it is
            None if the engine has no such option.
        models: the models to run on: tiny random models, "ARCHITECTURE-WEIGHTS" (llama, qwen2 or qwen3; f32, f16 or
            q8_0); "demo" for the chat model of slm-core; or the path of a GGUF file.
        load_options: passed to ``load`` as ``backend_options``.
        precision: the numbers of products, by weight type: "float32", "float16" (or bfloat16), or "quantized"
            (quantized activations). The tolerances follow from it (clause 9).
        kv_types: the KV types that the backend supports; all others must be refused. If empty, the suite tries all.
            Scenarios use the first one: put the most exact type first.
        declares: the edit level and the capabilities that contexts of ``models`` must declare, as
            ``{"cut", "shared_fork"}``. Empty: any; then the scenarios of a capability that gets lost are skipped, and
            the run passes.
        required: whether the run fails if the backend is not installed; otherwise its scenarios are skipped.
        above_contract: the models for scenarios of sessions, chats, generation, sampling and constraints: one for each
            scenario, "in turn"; "each model", in each chat format; or "elsewhere": another module of the project runs
            them on this backend.
        isolated: whether each model is loaded in a process of its own (``slm_core.load(..., isolated=True)``).
        slow: whether scenarios that take long are run, too. False for a second adoption of the same backend.
        volume: the share of random programs, random strings, hostile dumps, repeated truncates and closed contexts that
            is run: less than 1 for slow decodes, or for a second adoption of the same backend.
        expected_failures: scenarios that the backend is known to fail, with the reason:
            ``{"TestCut::test_of_a_span": "engine bug 123"}``. Each must fail, and the reason is shown.
    """

    backend: ClassVar[str] = COMMAND_LINE
    device: ClassVar[str] = "auto"
    n_threads: ClassVar[int | Literal["one"] | None] = "one"
    models: ClassVar[tuple[str, ...]] = DEFAULT_MODELS
    load_options: ClassVar[Mapping[str, object]] = MappingProxyType({})
    precision: ClassVar[Mapping[str, str]] = MappingProxyType({"f32": "float32", "f16": "float16", "q8_0": "quantized"})
    kv_types: ClassVar[tuple[str, ...]] = ()
    declares: ClassVar[Collection[str]] = ()
    required: ClassVar[bool] = False
    above_contract: ClassVar[Literal["in turn", "each model", "elsewhere"]] = "in turn"
    isolated: ClassVar[bool] = False
    slow: ClassVar[bool] = True
    volume: ClassVar[float] = 1.0
    expected_failures: ClassVar[Mapping[str, str]] = MappingProxyType({})
