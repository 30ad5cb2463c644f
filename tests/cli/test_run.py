"""``slm run``: where the model and the prompt come from."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.cli import options
from slm_core.cli import run as run_module
from slm_core.cli.app import app

GREEDY = ("--backend", "native", "--temperature", "0")
DEMO = str(slm.demo_model_path())


@pytest.fixture(scope="module")
def chat() -> slm.Chat:
    model = slm.load(slm.demo_model_path(), backend="native")
    return model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0))


@pytest.mark.parametrize(
    "arguments",
    [
        ("What is 12 + 30?",),
        (DEMO, "What is 12 + 30?"),
        (DEMO, "-p", "What is 12 + 30?"),
        ("-p", "What is 12 + 30?"),
    ],
)
def test_a_prompt_is_an_argument_or_an_option(run, arguments: tuple[str, ...]) -> None:
    assert run("run", *arguments, *GREEDY).out == "12 + 30 = 42\n"


def test_a_prompt_may_be_longer_than_the_name_of_a_file(run, chat) -> None:
    prompt = "Hello " * 60 + "there!"  # a name has at most 255 bytes
    with chat.fork() as fork:
        assert run("run", prompt, *GREEDY).out == fork.send(prompt).text + "\n"
    longer_than_a_path = run("run", "Hello " * 2000, *GREEDY, "--ctx", "64")
    assert "free (--ctx N sets a larger one)" in longer_than_a_path.err
    assert "is neither a model" in run("run", "x" * 300, *GREEDY).err


def test_one_word_behind_a_model_is_a_prompt(run, chat) -> None:
    with chat.fork() as fork:
        assert run("run", DEMO, "Hello!", *GREEDY).out == fork.send("Hello!").text + "\n"


def test_a_file_with_a_space_in_its_name_is_a_model(run, tmp_path: Path) -> None:
    model = tmp_path / "my model"
    model.symlink_to(slm.demo_model_path())
    assert run("run", str(model), *GREEDY, input="What is 12 + 30?").out == "12 + 30 = 42\n"
    missing = run("run", "no such model.gguf", *GREEDY, input="What is 12 + 30?")
    assert missing.err == "error: no such model.gguf: no such file\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen3",), "'qwen3' is neither a model (a file, a directory, hf://user/repo) nor a prompt with a space"),
        (("Hello!",), "(a prompt of one word: -p Hello!)"),
        ((DEMO, "Hello!", "-p", "Hi!"), "the prompt is given twice: 'Hello!' and --prompt"),
        ((), "there is no prompt: give one as an argument, or on standard input"),
        (("-p", "My name is Ada. " * 99, "--ctx", "64"), "free (--ctx N sets a larger one)"),
    ],
)
def test_what_is_neither_a_model_nor_a_prompt_is_an_error(run, arguments: tuple[str, ...], message: str) -> None:
    outcome = run("run", *arguments, *GREEDY)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert message in outcome.err


def test_standard_input_stands_before_the_prompt(run, chat) -> None:
    with chat.fork() as fork:
        expected = fork.send("My dog is called Rex.\n\nWhat is my dog called?")
    outcome = run("run", "What is my dog called?", "--json", *GREEDY, input="My dog is called Rex.\n")
    report = json.loads(outcome.out)
    assert (report["text"], report["usage"]["prompt_tokens"]) == (expected.text, expected.usage.prompt_tokens)
    assert "Rex" in report["text"]


def test_waiting_for_standard_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = threading.Event()

    class Slow(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            assert noted.wait(60), "no note while standard input is read"
            return "text"

    monkeypatch.setattr(run_module, "STDIN_NOTE_S", 0.0)
    monkeypatch.setattr(run_module, "note", lambda message: noted.set())
    monkeypatch.setattr(sys, "stdin", Slow())
    assert run_module._standard_input(beside_prompt=True) == "text"


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "slm_core", "run", "What is 12 + 30?", *GREEDY]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout == "12 + 30 = 42\n"


def test_models_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sub/more.gguf", "sub/more.txt", "some.gguf", "some.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert options.model_files("s") == ["some.gguf", "sub"]
    assert options.model_files("sub/") == ["sub/more.gguf"]
    assert options.model_files(f"{tmp_path}/so") == [f"{tmp_path}/some.gguf"]
    assert options.model_files("nowhere/x") == []


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("slm ch", "chat"),
        ("slm run --backend nat", "native"),
        ("slm chat --pla", "--plain"),
        ("slm run {folder}/so", "some.gguf"),
        ("slm run --draft {folder}/so", "some.gguf"),
        ("slm chat --tools {folder}/so", "some.gguf"),
        ("slm chat --gram", "--grammar"),
    ],
)
def test_the_shell_completes(tmp_path: Path, words: str, completed: str) -> None:
    (tmp_path / "some.gguf").touch()
    typed = words.replace("{folder}", str(tmp_path))
    environment = {"_SLM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = CliRunner().invoke(app, [], env=environment, prog_name="slm")
    assert [line.rpartition("/")[2] for line in done.stdout.split()] == [completed]


def test_a_suffix_makes_a_gap(run, tmp_path: Path) -> None:
    path = make_tiny_model("llama").write(tmp_path / "tiny.gguf")
    with slm.load(path, backend="native") as model:
        gap = slm.Infill("What is", " 42?")
        expected = model.generate(gap, slm.Sampling(temperature=0, max_tokens=6)).text
    arguments = ("run", str(path), "-p", "What is", "--suffix", " 42?", *GREEDY, "--max-tokens", "6")
    assert run(*arguments).out == expected + "\n"
    assert expected in run(*arguments, "-n", "2").out
    refused = run("run", DEMO, "-p", "What is", "--suffix", " 42?", *GREEDY)
    assert refused.code == 1
    assert refused.err.startswith("error: the vocabulary has no tokens for text with a gap")
    assert "--suffix continues a plain text" in run(*arguments, "--system", "Be brief.").err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["backends"]])
def test_output_that_cannot_be_written_is_an_error_of_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "slm_core", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 1), done.stderr
    assert lines[0].startswith("error: ") and "No space left on device" in lines[0]
