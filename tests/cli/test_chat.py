"""``slm chat`` with a script on its standard input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slm_core as slm
from slm_core.cli.app import app
from slm_core.toolschema import tool_schema

GREEDY = ("--backend", "native", "--temperature", "0")
NEEDS_PIPES = pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")


@pytest.fixture(scope="module")
def model() -> slm.Model:
    return slm.load(slm.demo_model_path(), backend="native")


@pytest.fixture
def chat(model: slm.Model) -> slm.Chat:
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


def test_going_back_to_a_copy_continues_from_it(run, model, chat) -> None:
    """Answers equal those of a chat without the messages after the copy."""
    first = chat.send("My name is Ada.").text
    with model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0), messages=chat.messages) as other:
        expected = [first, chat.send("My dog is called Rex.").text, other.send("What is my dog called?").text]
    with chat.fork() as other:
        expected += [other.send("What is my dog called?").text, chat.send("What is my dog called?").text]
    assert "Rex" in expected[3] and "Rex" not in expected[2]
    question = "What is my dog called?"
    script = ["My name is Ada.", "/fork", "My dog is called Rex.", "/fork dog", "/back 1", question, "/back dog"]
    outcome = run("chat", *GREEDY, input="\n".join([*script, question, "/back dog", question, "/back"]))
    assert outcome.out.splitlines() == expected
    assert outcome.err.splitlines() == [
        f"(copy 1: 2 messages, the last one assistant: {expected[0]})",
        f"(copy dog: 4 messages, the last one assistant: {expected[1]})",
        "(going on with 2 messages of copy 1)",
        "(going on with 4 messages of copy dog)",
        "(going on with 4 messages of copy dog)",
        f"1: 2 messages, the last one assistant: {expected[0]}",
        f"dog: 4 messages, the last one assistant: {expected[1]}",
    ]


def test_a_copy_survives_another_context_and_keeps_no_options(run, chat) -> None:
    expected = [chat.send(text).text for text in ("My name is Ada.", "What is my name?")]
    script = ["My name is Ada.", "/fork", "/set max_tokens 3", "/set ctx 512", "/clear", "/back", "/back 1"]
    outcome = run(
        "chat", *GREEDY, input="\n".join([*script, "/set max_tokens", "What is my name?", "/fork off", "/back"])
    )
    answer = outcome.out.splitlines()[1]
    assert expected[1].startswith(answer) and answer != expected[1], "the option stays"
    assert "to be computed again: the context is another one" in outcome.err.splitlines()[2]
    assert outcome.err.splitlines()[3:5] == ["(going on with 2 messages of copy 1)", "max_tokens = 3"]
    assert outcome.err.splitlines()[-2:] == ["(1 copies dropped)", "(no copies yet: /fork keeps one)"]


def test_a_copy_without_a_free_sequence_is_computed_again(run, chat) -> None:
    """A chat has 8 sequences: itself, and 7 copies."""
    expected = [chat.send(text).text for text in ("My name is Ada.", "What is my name?")]
    script = ["My name is Ada.", *["/fork"] * 8, "/clear", "/back 8", "What is my name?", "/back"]
    outcome = run("chat", *GREEDY, input="\n".join(script))
    assert outcome.out.splitlines() == expected
    notes = outcome.err.splitlines()
    assert not any("computed again" in note for note in notes[:7])
    assert notes[7].endswith("to be computed again: no sequence of the context is free)")
    assert all("to be computed again" in note for note in notes[-8:]), "8 was computed in another context"


def test_going_back_keeps_options_and_frees_what_is_left(run, chat) -> None:
    """Each /back leaves a conversation that fills more than half of the context."""
    expected = chat.send("My name is Ada.").text
    turns = ["Hello! " * 24, "/back 1"] * 12
    outcome = run("chat", *GREEDY, "--ctx", "128", input="\n".join(["My name is Ada.", "/fork", *turns, "/back"]))
    assert "error" not in outcome.err and len(outcome.out.splitlines()) == 13
    assert outcome.err.splitlines()[-1] == f"1: 2 messages, the last one assistant: {expected}"
    options = run("chat", *GREEDY, input="Hello!\n/fork\n/set max_tokens 3\n/back 1\n/set max_tokens\n")
    assert options.err.splitlines()[-1] == "max_tokens = 3"


def test_copies_take_room_and_can_be_dropped(run) -> None:
    long = "Hello! " * 12
    script = [long, "/fork", "/clear", long + "Bye.", "/fork", "/clear", long + "Hi.", "/fork off", long + "Hi."]
    outcome = run("chat", *GREEDY, "--ctx", "100", input="\n".join(script))
    full = [line for line in outcome.err.splitlines() if line.startswith("error: the context is full")]
    assert len(full) == 1 and full[0].endswith("; /fork off drops the copies)")
    assert len(outcome.out.splitlines()) == 3


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


def test_another_backend_gets_all_flags_but_options_of_the_first(run, monkeypatch) -> None:
    if not any(status.installed for status in slm.backends() if status.name == "llamacpp"):
        pytest.skip("backend llamacpp is not installed")
    chats = []

    def load(source, **options):
        chats.append((options["backend"], options["tokenizer"], options.get("tier")))
        return slm.load(source, **options)

    monkeypatch.setattr("slm_core.cli.options.load", load)
    vocabulary = slm.demo_model_path()
    flags = ("--tokenizer", str(vocabulary), "-o", "tier=reference")
    outcome = run("chat", *GREEDY, *flags, input="/backend llamacpp\n/backend native\n")
    assert (outcome.code, "error" in outcome.err) == (0, False), outcome.err
    expected = [("native", "reference"), ("llamacpp", None), ("native", "reference")]
    assert chats == [(name, vocabulary, tier) for name, tier in expected]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "/nosuch",
            "error: unknown command /nosuch (accepted: /regen, /edit, /undo, /forget, /fork, /back, /clear, /system,"
            " /set, /schema, /tools, /backend, /stats, /save, /load, /help, /exit)",
        ),
        ("/undo", "error: you have not said anything yet"),
        ("/regen", "error: you have not said anything yet"),
        ("/edit", "error: you have not said anything yet"),
        ("/edit 3 text", "error: there is no message 3 (/forget lists them)"),
        ("/set tempo 3", "error: unknown sampling option 'tempo' (accepted: "),
        ("/set tempo", "error: unknown sampling option 'tempo' (accepted: "),
        ("/set logprobs 3", "error: unknown sampling option 'logprobs' (accepted: "),
        ("/set temperature -1", "error: temperature=-1"),
        ("/set thinking maybe", "error: thinking='maybe' (accepted: auto, off, on)"),
        ("/set overflow roll", "error: overflow='roll' (accepted: error, shift, truncate_middle)"),
        ("/set ctx 0", "error: ctx='0' (accepted: a number of tokens from 1 on)"),
        ("/stats maybe", "error: /stats maybe (accepted: on, off)"),
        ("/schema {", "error: "),
        ('/schema {"type": "nosuch"}', "error: "),
        ("/schema no-such.json", "No such file or directory"),
        ("/tools no-such.py", "error: no-such.py: no such file"),
        ("/tools {damaged}", "is not JSON"),
        ("/forget 5", "error: there is no message 5 (/forget lists them)"),
        ("/back 1", "error: there is no copy '1' (accepted: none yet: /fork)"),
        ("/forget x", "error: there is no message x (/forget lists them)"),
        ("/save", "error: /save needs the name of a file"),
        ("/save no-such-folder/talk.chat", "No such file or directory"),
        ("/load no-such.chat", "No such file or directory"),
        ("/load {damaged}", "error: "),
        pytest.param("/load {pipe}", "not a regular file", marks=NEEDS_PIPES),
        pytest.param("/save {pipe}", "not a regular file", marks=NEEDS_PIPES),
        ("/backend nosuch", "error: unknown backend 'nosuch' (registered: "),
    ],
)
def test_an_error_leaves_the_conversation_unchanged(run, chat, tmp_path: Path, command: str, message: str) -> None:
    damaged = tmp_path / "damaged.chat"
    damaged.write_bytes(b"not a dump")
    if "{pipe}" in command:
        os.mkfifo(tmp_path / "pipe")
    command = command.replace("{damaged}", str(damaged)).replace("{pipe}", str(tmp_path / "pipe"))
    expected = [chat.send("Hello!").text]
    outcome = run("chat", *GREEDY, input=f"{command}\nHello!\n/exit\nnot read\n")
    assert (outcome.code, outcome.out.splitlines()) == (0, expected)
    assert len(outcome.err.splitlines()) == 1
    assert message in outcome.err


def test_a_doubled_slash_begins_a_message(run, chat) -> None:
    expected = chat.send("/help").text
    assert run("chat", *GREEDY, input="//help\n").out == expected + "\n"


def test_help_lists_the_commands(run) -> None:
    outcome = run("chat", *GREEDY, input="/help\n").err
    for command in (
        *("/undo", "/forget", "/save", "/load", "/backend", "/system", "/help", "/exit", "/regen", "/edit"),
        *("/clear", "/stats", "/set", "/tools", "/schema"),
    ):
        assert f"\n{command} " in f"\n{outcome}"


def test_the_page_lists_the_commands(run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    listed = set(re.findall(r"/[a-z]+", " ".join(re.findall(r"^\| (`/.*?) \| ", page, re.MULTILINE))))
    helped = set(re.findall(r"^(/[a-z]+)", run("chat", *GREEDY, input="/help\n").err, re.MULTILINE))
    assert listed == helped - {"/help", "/exit"}


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit"])
def test_a_word_leaves(run, chat, word: str) -> None:
    expected = chat.send("Hello!").text
    assert run("chat", *GREEDY, input=f"Hello!\n{word}\nnot read\n").out == expected + "\n"


def test_regen_draws_another_answer(run, model) -> None:
    warm = ("--backend", "native", "--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "4")
    sampling = slm.Sampling(temperature=3, top_k=0, top_p=1, min_p=0, seed=4, max_tokens=8)
    with model.chat(n_ctx=1024, sampling=sampling) as chat:
        first = chat.send("Hello!").text
        second = chat.regenerate().run().text
    outcome = run("chat", *warm, "--max-tokens", "8", input="Hello!\n/regen\n/stats\n")
    assert outcome.out == f"{first}\n{second}\n"
    assert first != second
    assert "2 messages" in outcome.err


def test_edit_asks_another_question_or_changes_a_message(run, chat) -> None:
    expected = [chat.send(text).text for text in ("My name is Ada.", "My dog is called Rex.")]
    chat.delete(3)
    chat.delete(2)
    expected.append(chat.send("What is my name?").text)
    chat.edit(0, "My name is Bob.")
    chat.delete(3)
    chat.delete(2)
    expected.append(chat.send("What is my name?").text)
    script = "My name is Ada.\nMy dog is called Rex.\n/edit What is my name?\n/edit 0 My name is Bob.\n/regen\n"
    outcome = run("chat", *GREEDY, input=script)
    assert outcome.out.splitlines() == expected
    assert "Bob" in expected[-1]
    assert outcome.err == "(changed: user: My name is Bob.)\n"


def test_an_edit_that_fails_changes_nothing(run, chat) -> None:
    expected = [chat.send(text).text for text in ("My name is Ada.", "What is my name?")]
    outcome = run("chat", *GREEDY, "--ctx", "64", input=f"My name is Ada.\n/edit {'x ' * 200}\nWhat is my name?\n")
    assert outcome.out.splitlines() == expected
    assert "the context is full" in outcome.err and outcome.err.count("\n") == 1


def test_clear_keeps_the_system_message(run, model) -> None:
    chat = model.chat(system="You are Pip.", n_ctx=1024, sampling=slm.Sampling(temperature=0))
    expected = [chat.send("My name is Ada.").text]
    chat.delete(2)
    chat.delete(1)
    expected.append(chat.send("What is my name?").text)
    script = "My name is Ada.\n/clear\nWhat is my name?\n/system\n"
    outcome = run("chat", *GREEDY, "-s", "You are Pip.", input=script)
    assert outcome.out.splitlines() == expected
    assert outcome.err == "(2 messages removed)\nYou are Pip.\n"


def test_options_are_set_and_shown(run) -> None:
    changes = ("max_new_tokens=2", "max_tokens", "thinking on", "overflow shift", "ctx 256", "")
    script = "".join(f"/set {change}\n" for change in changes)
    outcome = run("chat", *GREEDY, "--stats", input=f"{script}Hello!\n/set max_tokens none\n/set max_tokens\n")
    shown = outcome.err.splitlines()
    assert shown[0] == "max_tokens = 2"
    assert {"ctx = 256", "overflow = shift", "thinking = on", "temperature = 0.0", "max_tokens = 2"} <= set(shown)
    assert any("2 tokens at" in line and line.endswith("length") for line in shown)
    assert "(cut off after 2 tokens: /set max_tokens N)" in shown
    assert shown[-1] == "max_tokens = none"


def test_a_larger_context_keeps_the_conversation(run) -> None:
    lines = "My name is Ada.\n" + "Hello! " * 30 + "\n/set ctx 512\n" + "Hello! " * 30 + "\nWhat is my name?\n"
    outcome = run("chat", *GREEDY, "--ctx", "64", input=lines)
    assert "tokens needed" in outcome.err
    for advice in ("/clear begins anew", "/undo and /forget make room", "/set ctx N is larger", "/set overflow shift"):
        assert advice in outcome.err
    assert outcome.err.count("\n") == 1, "the second attempt fits"
    assert "Ada" in outcome.out.splitlines()[-1]


def test_stats_are_shown(run, chat) -> None:
    answer = chat.send("Hello!")
    outcome = run("chat", *GREEDY, input="Hello!\n/stats\n/stats on\nHello!\n/stats off\nHello!\n")
    first = outcome.err.splitlines()[0]
    n = chat.session.context.length(chat.session.seq_id)
    assert first.startswith(f"2 messages, demo.gguf · native (cpu) · context {n}/1024 ({100 * n // 1024} %) · ")
    assert outcome.err.splitlines()[1].startswith(
        f"the last answer: {answer.usage.prompt_tokens} prompt tokens (0 cached)"
    )
    assert len(outcome.err.splitlines()) == 3, "one line follows the second answer, none the third"


def test_answers_follow_a_schema(run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    script = ["/schema", f"/schema {tmp_path}/schema.json", "Hello!", '/schema {"const": 7}', "Hello!"]
    outcome = run("chat", *GREEDY, input="\n".join([*script, "/schema", "/schema off", "/schema"]))
    first, second = outcome.out.splitlines()
    assert json.loads(first) in ("yes", "no")
    assert json.loads(second) == 7
    assert outcome.err.splitlines() == ["(answers are free)", '{"const": 7}', "(answers are free)"]


TOOLS = '''
from math import sqrt

def get_weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: the city.
    """
    return "The weather in " + city + " is sunny."

def _hidden(x: int) -> int:
    return x
'''


def test_functions_of_a_file_are_called(run, tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "later.py").write_text("async def later(x: int) -> int:\n    return x\n")
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    question = "What is the weather in Paris?"
    namespace: dict[str, object] = {}
    exec(TOOLS, namespace)
    with model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0), tools=[namespace["get_weather"]]) as chat:
        answer = chat.send(question)
    assert answer.results, "the demo model calls this tool"
    script = "".join(f"/tools {tmp_path}/{name}.py\n" for name in ("later", "wrong", "empty", "tools"))
    outcome = run("chat", *GREEDY, input=f"{script}{question}\n/tools off\n")
    assert [line for line in outcome.out.splitlines() if line] == [
        'get_weather({"city": "Paris"}) -> The weather in Paris is sunny.',
        answer.text,
    ]
    later, wrong, empty, listed, off = outcome.err.splitlines()
    assert "later is async (accepted: functions that are not)" in later
    assert wrong.endswith("wrong.py cannot be run: ZeroDivisionError: division by zero")
    assert "contains no tools" in empty
    assert listed == "get_weather: Look up the weather of a city."
    assert off == "(no tools)"


def test_results_of_other_tools_are_typed(run, tmp_path: Path, model) -> None:
    schema = tool_schema(weather)
    (tmp_path / "tools.json").write_text(json.dumps([schema]))
    question, result = "What is the weather in Paris?", "The weather in Paris is sunny."
    with model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0), tools=[schema]) as chat:
        (call,) = chat.send(question).tool_calls
        expected = chat.send(slm.Message(slm.Role.TOOL, result, name=call.name, tool_call_id=call.id)).text
    outcome = run("chat", *GREEDY, input=f"/tools {tmp_path}/tools.json\n{question}\n{result}\n/undo\n")
    assert [line for line in outcome.out.splitlines() if line] == ['get_weather({"city": "Paris"})', expected]
    assert f"(taken back: user: {question})" in outcome.err


def weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: the city.
    """
    raise NotImplementedError


weather.__name__ = "get_weather"


def test_an_unexpected_error_does_not_end_the_chat(run, chat, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, honest = chat.send("Hello!").text, slm.Chat.stream

    def broken(self: slm.Chat, content: str, **options: object) -> slm.ChatStream:
        if content == "break":
            raise RuntimeError("out of order")
        return honest(self, content, **options)

    monkeypatch.setattr(slm.Chat, "stream", broken)
    outcome = run("chat", *GREEDY, input="break\nHello!\n")
    assert (outcome.code, outcome.out) == (0, expected + "\n")
    assert outcome.err == "error: RuntimeError: out of order (--debug shows where)\n"
    with pytest.raises(RuntimeError):
        CliRunner().invoke(app, ["chat", *GREEDY, "--debug"], input="break\n", catch_exceptions=False)


def test_messages_cannot_control_the_terminal(run) -> None:
    outcome = run("chat", *GREEDY, input="/system a\x1b[2Jb\x07\n/system\n/nosuch\x1b[2J\n/forget\n")
    assert "a[2Jb" in outcome.err
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", outcome.err)
