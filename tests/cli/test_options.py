"""Groups of flags compared with the options of the library."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import slm_core as slm
from slm_core.cli.conversation import Conversation
from slm_core.cli.options import EngineOptions, SamplingOptions, expand_groups, read_kv_types
from slm_core.cli.streaming import View
from slm_core.types import ContextOptions, KvType

OPTIONS = {field.name: field for field in fields(slm.Sampling)}
TYPES = get_type_hints(slm.Sampling)


@dataclass(frozen=True)
class Pair:
    left: int = 1
    right: str = "r"


@dataclass(frozen=True)
class OtherLeft:
    left: int = 2


FLAGS = [field for field in fields(SamplingOptions) if field.name not in ("preset", "others")]


@pytest.mark.parametrize("field", FLAGS, ids=lambda field: field.name)
def test_a_sampling_flag_has_the_type_and_the_default_of_its_option(field) -> None:
    annotated, option = get_args(get_type_hints(SamplingOptions, include_extras=True)[field.name])
    default = OPTIONS[field.name].default
    accepted = set(get_args(annotated)) - {type(None)}
    if TYPES[field.name] == tuple[str, ...]:
        assert accepted == {list[str]}
    else:
        assert accepted == (set(get_args(TYPES[field.name])) or {TYPES[field.name]}) - {type(None)}
    assert option.default == f"--{field.name.replace('_', '-')}", "typer keeps the flag's name there"
    assert (f"(default {default})" in option.help) == (default not in (None, ()))


def test_engine_flags_have_the_defaults_of_load() -> None:
    defaults = {name: parameter.default for name, parameter in inspect.signature(slm.load).parameters.items()}
    engine = EngineOptions()
    assert (engine.backend, engine.device, engine.threads, engine.isolated) == tuple(
        defaults[name] for name in ("backend", "device", "n_threads", "isolated")
    )


def test_fields_of_a_group_replace_its_parameter() -> None:
    calls = []

    @expand_groups
    def command(*, before: int, pair: Pair, after: bool = False) -> None:
        calls.append((before, pair, after))

    parameters = inspect.signature(command).parameters
    assert [(name, p.default) for name, p in parameters.items()] == [
        ("before", inspect.Parameter.empty),
        ("left", 1),
        ("right", "r"),
        ("after", False),
    ]
    command(before=3, left=4, right="x", after=True)
    assert calls == [(3, Pair(4, "x"), True)]


def test_groups_with_a_common_flag_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicate parameter name: 'left'"):

        @expand_groups
        def command(*, pair: Pair, other: OtherLeft) -> None: ...


def test_kv_types_are_one_or_two() -> None:
    assert read_kv_types(None) == {}
    assert read_kv_types("Q8_0") == {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}
    assert read_kv_types("q8_0,f16") == {"kv_type_k": "q8_0", "kv_type_v": "f16"}
    for text in ("", "q8_0,", "q8_0,f16,f16", "q9_0"):
        with pytest.raises(slm.InvalidOption, match="--kv-type"):
            read_kv_types(text)


@pytest.mark.parametrize("command", ["run", "score", "bench"])
def test_commands_use_kv_types(run, tmp_path: Path, command: str) -> None:
    """The engine refuses a KV type that only the torch tier has: so the option reached the engine."""
    text = tmp_path / "text"
    text.write_text("the dog")
    arguments = {
        "run": ("What is 12 + 30?",),
        "score": (str(text),),
        "bench": ("--prompt-tokens", "4", "--new-tokens", "2"),
    }
    native = (*arguments[command], "--backend", "native")
    assert run(command, *native, "--kv-type", "q8_0").code == 0
    refused = run(command, *native, "--kv-type", "f8_e4m3")
    assert refused.code == 1
    assert refused.err.startswith("error: this tier has no KV type f8_e4m3")


def test_a_conversation_keeps_its_kv_types() -> None:
    loaded = slm.load(slm.demo_model_path(), backend="native")
    chat = loaded.chat(n_ctx=512, kv_type_k="q8_0", kv_type_v="q8_0")
    with Conversation(lambda name: slm.load(slm.demo_model_path(), backend=name), loaded, chat, _no_view) as talk:
        talk.replace_messages(())
        assert talk.chat.session.context.options == ContextOptions(512, 8, 512, KvType.Q8_0, KvType.Q8_0)
        talk.restore(talk.chat.dump(), 1024)
        assert talk.chat.session.context.options == ContextOptions(1024, 8, 512, KvType.Q8_0, KvType.Q8_0)
        talk.move("onnx")
        assert talk.chat.session.context.options == ContextOptions(1024, 8, 512, KvType.Q8_0, KvType.Q8_0)


def _no_view() -> View:
    raise AssertionError("nobody says anything")
