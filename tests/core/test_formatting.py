"""``slm.formatter``: the source of a chat format, and the report of it."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import InvalidModelFile, TemplateError
from slm_core.protocols import Formatter

MESSAGES = [slm.Message("user", "Hi")]
TOOL = {"type": "function", "function": {"name": "f"}}
PLAIN, WITH_TOOLS = "{{ bos_token }}plain{{ eos_token }}", "{{ tools[0].function.name }}"


def prompt(formatter: Formatter, **options: Any) -> str:
    return "".join(segment.text for segment in formatter.render(MESSAGES, **options))


def gguf_file(path: Path, **metadata: object) -> Path:
    tiny = make_tiny_model("llama")
    tiny.tensors.clear()
    del tiny.metadata["tokenizer.chat_template"]
    tiny.metadata.update(metadata)  # type: ignore[arg-type]
    return tiny.write(path / "m.gguf")


def directory(folder: Path, config: object, **files: str) -> Path:
    (folder / "additional_chat_templates").mkdir()
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        place = folder if name == "chat_template" else folder / "additional_chat_templates"
        (place / f"{name}.jinja").write_text(text)
    return folder


def test_a_template_with_its_tokens_and_its_clock() -> None:
    template = "{{ bos_token }}{{ strftime_now('%d %B %Y') }}{{ eos_token }}"
    formatter = slm.formatter(template=template, bos_token="<s>", eos_token="</s>", now=datetime(2026, 1, 15))
    assert prompt(formatter) == "<s>15 January 2026</s>"
    assert formatter.name == "template of the caller"


def test_the_models_own_template_and_tokens(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, **{"tokenizer.chat_template": PLAIN})
    vocab = slm.load_vocab(path)
    bos, eos = (
        vocab.token_bytes(token, special=True).decode() for token in (vocab.bos, vocab.eos) if token is not None
    )
    formatter = slm.formatter(model=path)
    assert (prompt(formatter), formatter.name) == (f"{bos}plain{eos}", "template of the model file")
    assert prompt(slm.formatter(model=path, bos_token="B")) == f"Bplain{eos}"
    assert prompt(slm.formatter(model=path, template="{{ eos_token }}")) == eos
    assert prompt(slm.formatter(model=path, name="llama2")) == f"{bos}[INST] Hi [/INST]"


def test_further_templates_of_a_file_are_used_for_tools_and_by_name(tmp_path: Path) -> None:
    further = {"tokenizer.chat_templates": ["tool_use", "rag"], "tokenizer.chat_template.rag": "rag"}
    tools = {"tokenizer.chat_template.tool_use": WITH_TOOLS}
    path = gguf_file(tmp_path, **further, **tools, **{"tokenizer.chat_template": "plain"})
    formatter = slm.formatter(model=path)
    assert (prompt(formatter), prompt(formatter, tools=[TOOL]), prompt(formatter, tools=[])) == ("plain", "f", "plain")
    rag = slm.formatter(model=path, name="rag")
    assert (prompt(rag, tools=[TOOL]), rag.name) == ("rag", "template of the model file ('rag')")
    with pytest.raises(TemplateError, match=r"'rug' \(registered: .*; templates of the model: rag, tool_use\)"):
        slm.formatter(model=path, name="rug")


def test_a_file_without_a_main_template(tmp_path: Path) -> None:
    rag = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "rag"}
    path = gguf_file(tmp_path, **rag)
    with pytest.raises(TemplateError, match=r"no main chat template: name one of its others \(rag\)"):
        slm.formatter(model=path)
    assert prompt(slm.formatter(model=path, name="rag")) == "rag"


def test_an_unknown_template_name_is_an_error(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, **{"tokenizer.chat_templates": ["rag"]})
    with pytest.raises((InvalidModelFile, slm.SlmError), match=r"tokenizer\.chat_template\.rag"):
        slm.formatter(model=path)


def test_a_guess_by_control_tokens_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config = {"added_tokens_decoder": {"5": {"content": "<|im_start|>"}, "6": "<|im_end|>"}}
    formatter = slm.formatter(model=directory(tmp_path, config))
    assert formatter.name == "chatml"
    assert "look like 'chatml', which is used" in caplog.text


def test_without_a_template_the_error_lists_known_formats(tmp_path: Path) -> None:
    with pytest.raises(
        TemplateError, match=r"vocabulary indicates none: name a format \(registered: alpaca, .*zephyr\)"
    ):
        slm.formatter(model=directory(tmp_path, {}))
    with pytest.raises(TemplateError, match=r"give a template, a model or the name of a chat format \(registered: "):
        slm.formatter()
    with pytest.raises(TemplateError, match="not both"):
        slm.formatter(template="x", name="chatml")


def test_template_files_of_a_directory_override_its_configuration(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
    config = {**tokens, "chat_template": "configured"}
    files = {"chat_template": PLAIN + "{{ pad_token }}", "tool_use": WITH_TOOLS}
    formatter = slm.formatter(model=directory(tmp_path, config, **files))
    assert (prompt(formatter), prompt(formatter, tools=[TOOL])) == ("<s>plain</s><pad>", "f")
    assert formatter.name == "chat_template.jinja"


@pytest.mark.parametrize(
    "template", [PLAIN, [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]]
)
def test_the_configuration_of_a_directory(tmp_path: Path, template: object) -> None:
    formatter = slm.formatter(model=str(directory(tmp_path, {"eos_token": "</s>", "chat_template": template})))
    assert (prompt(formatter), formatter.name) == ("plain</s>", "tokenizer_config.json")
    assert prompt(formatter, tools=[TOOL]) == ("f" if isinstance(template, list) else "plain</s>")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"chat_template": 1}', "neither a text nor a list"),
        ('{"chat_template": [{"name": "default"}]}', "neither a text nor a list"),
        ('{"chat_template": [1]}', "neither a text nor a list"),
        ('{"chat_template": "{% if %}"}', "not valid jinja"),
    ],
)
def test_a_damaged_configuration_is_an_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TemplateError, match=message) as caught:
        slm.formatter(model=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TemplateError, match="is not UTF-8"):
        slm.formatter(model=tmp_path)


def test_an_older_directory_has_its_tokens_in_another_file(tmp_path: Path) -> None:
    """As in transformers: the older file takes precedence, unless the configuration lists added tokens."""
    config = {"chat_template": PLAIN, "bos_token": "<s>", "eos_token": "</s>"}
    folder = directory(tmp_path, config)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<turn>", "lstrip": False}}))
    assert prompt(slm.formatter(model=folder)) == "<s>plain<turn>"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {}}))
    assert prompt(slm.formatter(model=folder)) == "<s>plain</s>"


def test_load_accepts_the_name_of_a_further_template(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama")
    tiny.metadata.update({"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "rag"})
    with slm.load(tiny.write(tmp_path / "m.gguf"), formatter="rag") as model:
        assert model.info.formatter == "template of the model file ('rag')"
        assert model.info.chat_templates == {"rag": "rag"}
        assert prompt(slm.formatter(model=model, name="rag")) == prompt(model.formatter) == "rag"
