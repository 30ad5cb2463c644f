"""Ctrl-C, colours and control characters, with real signals to a real process, on a pipe and on a terminal."""

from __future__ import annotations

import gc
import io
import json
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from slm_core.cli import main
from slm_core.cli.terminal import stopping, write
from tests.terminal_emulator import SLM, WAIT_S, terminal

# Nearly uniform sampling from the vocabulary without EOG: the answer takes minutes, until the context is full.
ENDLESS = ["--backend", "native", "--ctx", "100000", "-S", "ignore_eos=true", "--seed", "3"]
ENDLESS += ["--temperature", "50", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
GREEDY = ["--backend", "native", "--temperature", "0"]
COLOURS = r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38)(?:;\d+)*m"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the history, which is the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path


def test_ctrl_c_ends_a_run_and_keeps_its_text() -> None:
    command = [*SLM, "run", "-p", "Hello!", *ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n"), "the printed text is complete"
    assert errors == b"", errors


def test_ctrl_c_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "slm_core.cli.app", Interrupted("slm_core.cli.app"))
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 130


def test_a_command_ends_without_a_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would visit all objects of all modules before it ends: seconds after Ctrl-C on a busy machine."""
    at_exit: list[object] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(sys, "argv", ["slm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert gc.freeze in at_exit


@pytest.mark.skipif(sys.platform == "win32", reason="cmd.exe cannot close the streams of a command")
def test_closed_streams_are_no_error() -> None:
    command = [*SLM, "tokenize", "A text."]
    assert subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=False).returncode == 0


def test_ctrl_c_stops_an_answer_but_not_the_chat() -> None:
    """On 80 columns, too, the line of status says how to stop."""
    with terminal("chat", *ENDLESS, COLUMNS="80") as tty:
        tty.wait_for("^>$")
        tty.type("Hello!\r")
        tty.wait_for(r"^Ctrl-C stops · \d+ tokens · \d+ tokens/s · context ")
        tty.type("\x03")
        tty.wait_for(r"^\(stopped\)\n>$")
        tty.type("/forget\r")
        assert "0 user: Hello!" in tty.wait_for("1 assistant: .")
        tty.wait_for(r"1 assistant.*\n(.*\n)*>$")
        tty.type("exit\r")
        assert tty.process.wait(WAIT_S) == 0


def test_ctrl_c_twice_at_the_prompt_leaves() -> None:
    with terminal("chat", "--backend", "native") as tty:
        tty.wait_for("^>$")
        tty.type("not said\x03")
        tty.wait_for(r"^\(Ctrl-C again leaves\)\n>$")
        tty.type("\x03")
        assert tty.process.wait(WAIT_S) == 130


def test_input_of_several_lines_completion_and_editing(state: Path) -> None:
    with terminal("chat", *GREEDY) as tty:
        tty.wait_for("^>$")
        tty.type("\x1b[200~My name\nis Ada.\x1b[201~")
        tty.wait_for(r"^> My name\n  is Ada.")
        tty.type("\r")
        answered = tty.wait_for(r"^demo.gguf · native .* · context \d+/1024 \(\d+ %\) · \d+ tokens/s\s*$")
        assert re.search(r"^> My name\n  is Ada\.\n\w.*\n>$", answered, re.MULTILINE), answered
        tty.type("What\\\ris my\x1b\rname?\r")
        tty.wait_for(r"> What\n  is my\n  name\?\nYour name is Ada\.\n>$")
        tty.type("/sta\t")
        tty.wait_for(r"^> /stats")
        tty.type("\r")
        assert "4 messages" in tty.wait_for(r"^the last answer: .*\n(.*\n)*>$")
        tty.type("/backend nat\t")
        tty.wait_for(r"^> /backend native")
        tty.type("\x15/edit\r")
        tty.wait_for(r"^edit> What\n  is my\n  name\?")
        tty.type("\x7f or mine?\r")
        tty.wait_for(r"^  name or mine\?\n.*\n>$")
        tty.type("/forget\r")
        listed = tty.wait_for(r"3 assistant: .*\n>$")
        assert "  0 user: My name is Ada.\n" in listed, "the paste is one message"
        assert "  2 user: What is my name or mine?\n" in listed, "the edited question replaces the other"
        assert "  4 " not in listed
        tty.type("\x04")
        assert tty.process.wait(WAIT_S) == 0
    (file,) = state.rglob("*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()][:2] == [
        "My name\nis Ada.",
        "What\nis my\nname?",
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_history_of_earlier_chats_in_a_plain_chat(state: Path) -> None:
    file = state / "slm-core" / "chat-history.jsonl"
    file.parent.mkdir()
    file.write_text('"My dog\\nis called Rex."\n')
    with terminal("chat", *GREEDY, "--plain") as tty:
        tty.wait_for("^>$")
        tty.type("\x1b[A")
        tty.wait_for(r"^> My dog\n  is called Rex\.")
        tty.type("\r")
        text = tty.wait_for(r"is called Rex\.\n\w.*\n>$")
    assert not re.search(COLOURS, tty.output)
    assert "context" not in text, "there is no bottom line"
    assert json.loads(file.read_text()) == "My dog\nis called Rex.", "an input is kept once"


def test_no_history_keeps_nothing(state: Path) -> None:
    with terminal("chat", *GREEDY, "--no-history") as tty:
        tty.wait_for("^>$")
        tty.type("Hello!\r")
        tty.wait_for(r"^> Hello!\n\w.*\n>$")
        assert re.search(COLOURS, tty.output), "the roles have colours"
        tty.type("\x1b[A")
        tty.wait_for(r"^> Hello!\n\w.*\n> Hello!")
    assert list(state.iterdir()) == []


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_follow_the_environment(environment: dict[str, str], coloured: bool) -> None:
    with terminal("backends", **environment) as tty:
        tty.wait_for(r"yes.*\n")
    assert bool(re.search(COLOURS, tty.output)) == coloured, tty.output


def test_a_long_prompt_shows_its_progress() -> None:
    question = "My name is Ada. " * 200
    with terminal("run", "--backend", "native", "-p", question, "--ctx", "2048", "--max-tokens", "3") as tty:
        tty.wait_for_output(r"Reading.*\d+/\d+.*tokens")
        assert tty.process.wait(WAIT_S) == 0


def test_second_ctrl_c_interrupts() -> None:
    class Stubborn:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    stubborn, before = Stubborn(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stopping(stubborn):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert stubborn.cancelled == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_answers_cannot_control_the_terminal() -> None:
    text = "a\x1b[2Jb\x07\x9bc\td\ne"
    screen, pipe = (Console(file=io.StringIO(), force_terminal=on, color_system=None) for on in (True, False))
    write(screen, text)
    write(pipe, text)
    assert "\x1b" not in screen.file.getvalue()  # type: ignore[attr-defined]
    assert screen.file.getvalue().split() == ["a[2Jbc", "d", "e"]  # type: ignore[attr-defined]
    assert pipe.file.getvalue() == text  # type: ignore[attr-defined]
