"""What an adopter of the suite fills in. Light to import: a plugin module reads it in every run of pytest."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

DEFAULT_MODELS = ("llama-f32", "qwen2-f16", "qwen3-q8_0")
"""One of each architecture and of each weight type."""

FURTHER_MODELS = ("qwen2vl-f32", *(f"small_{kind}-f32" for kind in ("lfm2", "mamba2", "rwkv7", "window", "mla")))
"""One of each kind of memory, for random programs: M-RoPE, recurrent layers, sliding windows, latent attention."""

COMMAND_LINE = ""
"""The backend of a ``BackendFixtures`` that takes it from ``--slm-backend``."""


class BackendFixtures:
    """Says what is under test.

    Derive from it in a module that imports all scenarios, and the suite is adopted::

        from slm_conformance.fixtures import BackendFixtures
        from slm_conformance.scenarios import *  # noqa: F403


        class Fixtures(BackendFixtures):
            backend = "mine"

    Attributes:
        backend: a registered backend, or "package.module:attribute" for one that is not; what the attribute names is
            called without arguments. Scenarios that start another process import it there.
        device: passed to ``load``.
        n_threads: passed to ``load``; "one" by default: 1, as threads that wait for work slow tiny models down, or None
            if the engine refuses to be told.
        models: what to run on: tiny random models, "ARCHITECTURE-WEIGHTS" (llama, qwen2 or qwen3; f32, f16 or q8_0);
            "demo" for the chat model of slm-core; or the path of a GGUF file.
        load_options: passed to ``load`` as ``backend_options``.
        precision: by weight type, the numbers the backend computes with: "float32", "float16" (or bfloat16), or
            "quantized" activations. The tolerances follow from it (clause 9).
        kv_types: the storage types of keys and values that the backend has, any other must be refused; found by trying
            where none is named. Scenarios use the first: name the most exact one first.
        required: whether a backend that is not installed fails the run; otherwise its scenarios are skipped.
        above_contract: the models that scenarios of sessions, chats, generation, sampling and constraints run on: one
            each, "in turn"; "each model", in each chat format; or "elsewhere": another module of the same project
            runs them on this backend.
        volume: how many random programs and hostile dumps to try, as a share of the usual number: less where a
            decode takes long, or in a second adoption of the same backend.
        expected_failures: what the backend is known to break, with the reason:
            ``{"TestCut::test_of_a_span": "engine bug 123"}``. Each must fail, and the reason is shown.
    """

    backend: ClassVar[str] = COMMAND_LINE
    device: ClassVar[str] = "auto"
    n_threads: ClassVar[int | Literal["one"] | None] = "one"
    models: ClassVar[tuple[str, ...]] = DEFAULT_MODELS
    load_options: ClassVar[Mapping[str, object]] = MappingProxyType({})
    precision: ClassVar[Mapping[str, str]] = MappingProxyType({"f32": "float32", "f16": "float16", "q8_0": "quantized"})
    kv_types: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[bool] = False
    above_contract: ClassVar[Literal["in turn", "each model", "elsewhere"]] = "in turn"
    volume: ClassVar[float] = 1.0
    expected_failures: ClassVar[Mapping[str, str]] = MappingProxyType({})
