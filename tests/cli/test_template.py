"""``slm template`` shows the prompt that a chat format renders, and its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slm_core as slm
from slm_core.chat import encode_segments

MESSAGES = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi <|im_end|>"}]
CHATML = "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n"
GENERATION_PROMPT = "<|im_start|>assistant\n"


@pytest.fixture
def messages(tmp_path: Path) -> str:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(MESSAGES))
    return str(path)


@pytest.fixture
def vocabulary(shared_dir: Path) -> str:
    return str(shared_dir / "oracles" / "vocabs" / "ggml-vocab-qwen2.gguf")


def test_prompt_of_a_named_format(run, messages: str) -> None:
    assert run("template", "--messages", messages, "--formatter", "chatml").out == CHATML + GENERATION_PROMPT
    assert run("template", "-m", messages, "--format", "chatml", "--no-generation-prompt").out == CHATML
    assert (
        run("template", "--formatter", "chatml", input=json.dumps({"messages": MESSAGES})).out
        == CHATML + GENERATION_PROMPT
    )
    thinking = run("template", "-m", messages, "--formatter", "chatml", "--no-thinking").out
    assert thinking == CHATML + GENERATION_PROMPT + "<think>\n\n</think>\n\n"


def test_prompt_of_the_models_template_and_of_a_file(run, messages: str, tmp_path: Path) -> None:
    segments = slm.formatter(model=slm.demo_model_path()).render(MESSAGES)
    assert run("template", "-m", messages).out == "".join(segment.text for segment in segments)
    (tmp_path / "t.jinja").write_text("{{ messages | length }} {{ tools[0].name }}")
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    files = ("--template", str(tmp_path / "t.jinja"), "--tools", str(tmp_path / "tools.json"))
    assert run("template", "-m", messages, *files).out == "2 f"


def test_ids_are_the_tokens_that_a_chat_decodes(run, messages: str, vocabulary: str) -> None:
    segments = slm.formatter(name="qwen3").render(MESSAGES)
    ids = encode_segments(slm.load_vocab(vocabulary), segments)
    flags = ("-m", messages, "--formatter", "qwen3")
    assert run("template", vocabulary, *flags, "--ids").out.split() == [str(token) for token in ids]
    report = json.loads(run("template", vocabulary, *flags, "--json").out)
    assert report["ids"] == ids
    assert [slm.Segment(**part) for part in report["segments"]] == segments


def test_special_tokens_are_coloured_only_on_a_terminal(
    run, messages: str, vocabulary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (vocabulary, "-m", messages, "--formatter", "chatml")
    assert "\x1b" not in run("template", *flags).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = run("template", *flags).out
    assert "\x1b[1;35m<|im_start|>\x1b[0m\x1b[36muser\x1b[0m" in shown
    assert "Hi <|im_end|>\x1b[1;35m<|im_end|>\x1b[0m" in shown, "special tokens spelled in content have no colour"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ('"x"', "does not hold a list"), ("[1]", "does not hold a list"), ("{}", "not hold a list")],
)
def test_invalid_messages_are_refused(run, text: str, message: str) -> None:
    outcome = run("template", "--formatter", "chatml", input=text)
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


def test_errors_are_one_line(run, messages: str, tmp_path: Path) -> None:
    assert run("template", "-m", messages, "--formatter", "gemma").err == (
        "error: the chat template refused the messages: System role not supported\n"
    )
    assert run("template", "-m", messages, "--template", "x", "--formatter", "y").code == 2
    assert "no such" in run("template", "-m", str(tmp_path / "missing")).err.lower()
    (tmp_path / "chat_template.jinja").write_text("{{ messages[1].content }}")
    assert run("template", str(tmp_path), "-m", messages).out == "Hi <|im_end|>"
    assert "ids need a model file" in " ".join(run("template", str(tmp_path), "-m", messages, "--ids").err.split())
