"""``slm chat`` with a script on its standard input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slm_core as slm

GREEDY = ("--backend", "native", "--temperature", "0")


@pytest.fixture(scope="module")
def model() -> slm.LoadedModel:
    return slm.load(slm.demo_model_path(), backend="native")


@pytest.fixture
def chat(model: slm.LoadedModel) -> slm.Chat:
    return model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0))


def test_lines_are_answered_in_order(run, chat) -> None:
    lines = ["My name is Ada.", "", "What is my name?"]
    expected = [chat.send(line).text for line in lines if line]
    outcome = run("chat", *GREEDY, input="\n".join(lines))
    assert (outcome.code, outcome.out.splitlines()) == (0, expected)


def test_undo_removes_the_last_question(run, chat) -> None:
    first = chat.send("My name is Ada.").text
    second = chat.send("My dog is called Rex.").text
    chat.delete(3)
    chat.delete(2)
    third = chat.send("What is my dog called?").text
    outcome = run("chat", *GREEDY, input="My name is Ada.\nMy dog is called Rex.\n/undo\nWhat is my dog called?\n")
    assert outcome.out.splitlines() == [first, second, third]
    assert "(taken back: user: My dog is called Rex.)" in outcome.err


def test_forget_cuts_a_message(run, chat) -> None:
    answers = [chat.send(text).text for text in ("My dog is called Rex.", "My name is Ada.")]
    assert chat.forget(0) is slm.EditLevel.CUT
    answers.append(chat.send("What is my name?").text)
    script = "My dog is called Rex.\nMy name is Ada.\n/forget\n/forget 0\n/forget\nWhat is my name?\n"
    outcome = run("chat", *GREEDY, input=script)
    assert outcome.out.splitlines() == answers
    assert "  2 user: My name is Ada.\n" in outcome.err
    assert "(cut out of the KV cache: user: My dog is called Rex.)" in outcome.err
    assert "  1 user: My name is Ada.\n" in outcome.err, "the second list has new numbers"


def test_the_system_message_can_be_set_changed_and_shown(run, model) -> None:
    chat = model.chat(system="You are Pip.", n_ctx=1024, sampling=slm.Sampling(temperature=0))
    answer = chat.send("Hello!").text
    script = "/system\n/system You are terse.\n/system You are Pip.\n/system\nHello!\n"
    outcome = run("chat", *GREEDY, input=script)
    assert outcome.out.splitlines() == [answer]
    assert outcome.err.splitlines()[-2:] == ["(no system message)", "You are Pip."]


def test_a_saved_conversation_continues(run, chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.chat"
    expected = [chat.send(text).text for text in ("My name is Ada.", "What is my name?")]
    saved = run("chat", *GREEDY, input=f"My name is Ada.\n/save {file}\n")
    loaded = run("chat", *GREEDY, input=f"/load {file}\nWhat is my name?\n")
    assert saved.out.splitlines() + loaded.out.splitlines() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["talk.chat"], "nothing else is left behind"


def test_a_session_file_continues_after_a_restart(run, chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    lines = ["My name is Ada.", "My dog is called Rex.", "What is my name?"]
    expected = [chat.send(line).text for line in lines]
    outcomes = [run("chat", *GREEDY, "--session", str(file), input=line + "\n") for line in lines]
    assert [outcome.out for outcome in outcomes] == [text + "\n" for text in expected]
    assert "(going on with 4 messages of" in outcomes[2].err
    assert [path.name for path in tmp_path.iterdir()] == ["talk.session"], "nothing else is left behind"
    taken_back = run("chat", *GREEDY, "--session", str(file), input="/undo\n/forget\n")
    assert "2 user: My dog" in taken_back.err
    assert "(going on with 4 messages" in run("chat", *GREEDY, "--session", str(file), input="").err


def test_a_session_file_is_complete_after_each_answer_even_if_killed(model, tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    command = [sys.executable, "-c", "from slm_core.cli import main; main()", "chat", *GREEDY, "--session", str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"My name is Ada.\nHello!\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.readline()  # the second answer begins when the first is kept
        process.kill()
    with slm.Chat.restore(model, file.read_bytes()) as talk:
        assert [message.content for message in talk.messages][:1] == ["My name is Ada."]
        assert len(talk.messages) in (2, 4)


def test_a_session_file_with_options(run, tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    run("chat", *GREEDY, "--session", str(file), "-s", "You are Pip.", input="Hello!\n")
    again = run("chat", "--session", str(file), "-s", "You are Pip.", "--backend", "native", input="/system\n")
    assert (again.code, again.err.splitlines()[-1]) == (0, "You are Pip.")
    other = run("chat", "--session", str(file), "-s", "You are Pop.", "--backend", "native", input="Hello!\n")
    assert (other.code, "another system message" in other.err) == (1, True)
    before = file.read_bytes()
    short = run("chat", *GREEDY, "--session", str(file), "--max-tokens", "2", "--stats", input="Hello!\n")
    assert "2 tokens at" in short.err and "length" in short.err
    assert file.read_bytes() != before
    file.write_bytes(b"not a conversation")
    damaged = run("chat", *GREEDY, "--session", str(file), input="Hello!\n")
    assert damaged.code == 1 and len(damaged.err.splitlines()) == 1
    assert file.read_bytes() == b"not a conversation", "an unreadable file is not overwritten"


def test_a_full_context_is_handled_by_the_chosen_policy(run) -> None:
    lines = "\n".join(f"My name is Ada and I have {n} dogs." for n in range(8))
    full = run("chat", *GREEDY, "--ctx", "128", input=lines)
    assert "the context is full" in full.err
    shifted = run("chat", *GREEDY, "--ctx", "128", "--overflow", "shift", input=lines)
    assert "the context is full" not in shifted.err
    assert "(to make room, the 2 oldest messages were dropped)" in shifted.err
    wrong = run("chat", *GREEDY, "--overflow", "roll", input=lines)
    assert (wrong.code, "accepted: error, truncate_middle, shift" in wrong.err) == (1, True)


def test_a_conversation_moves_to_another_backend(run, chat) -> None:
    status = next((status for status in slm.backends() if status.name == "llamacpp"), None)
    if status is None or not status.installed:
        pytest.skip("backend llamacpp is not installed")
    expected = [chat.send(text).text for text in ("My name is Ada.", "What is my name?")]
    script = "My name is Ada.\n/backend llamacpp\n/backend\nWhat is my name?\n"
    outcome = run("chat", *GREEDY, input=script)
    assert outcome.out.splitlines() == expected
    assert "(going on with llamacpp" in outcome.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "/nosuch",
            "error: unknown command /nosuch (accepted: /undo, /forget, /system, /backend, /save, /load, /help, /exit)",
        ),
        ("/undo", "error: there is nothing to take back"),
        ("/forget 5", "error: there is no message 5 (/forget lists them)"),
        ("/forget x", "error: there is no message x (/forget lists them)"),
        ("/save", "error: /save needs the name of a file"),
        ("/save no-such-folder/talk.chat", "No such file or directory"),
        ("/load no-such.chat", "No such file or directory"),
        ("/load {damaged}", "error: "),
        ("/backend nosuch", "error: unknown backend 'nosuch' (registered: "),
    ],
)
def test_an_error_leaves_the_conversation_unchanged(run, chat, tmp_path: Path, command: str, message: str) -> None:
    damaged = tmp_path / "damaged.chat"
    damaged.write_bytes(b"not a dump")
    expected = [chat.send("Hello!").text]
    outcome = run("chat", *GREEDY, input=f"{command.format(damaged=damaged)}\nHello!\n/exit\nnot read\n")
    assert (outcome.code, outcome.out.splitlines()) == (0, expected)
    assert len(outcome.err.splitlines()) == 1
    assert message in outcome.err


def test_a_doubled_slash_begins_a_message(run, chat) -> None:
    expected = chat.send("/help").text
    assert run("chat", *GREEDY, input="//help\n").out == expected + "\n"


def test_help_lists_the_commands(run) -> None:
    outcome = run("chat", *GREEDY, input="/help\n").err
    for command in ("/undo", "/forget", "/save", "/load", "/backend", "/system", "/help", "/exit"):
        assert f"\n{command} " in f"\n{outcome}"
