"""Constraints on the command line: answers fit them, or the error says why not."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

import slm_core as slm
from slm_core.cli.constraints import read_grammar
from slm_core.constraints import Gbnf, JsonSchema, Lark, Regex

GREEDY = ("--backend", "native", "--temperature", "0")
GBNF = 'root ::= "blue" | "green"\n'
LARK = 'start: "blue" | "green"\n'


@pytest.fixture(scope="module")
def model() -> slm.Model:
    return slm.load(slm.demo_model_path(), backend="native")


def test_a_schema_is_json_or_a_file(run, tmp_path: Path) -> None:
    properties = {"n": {"enum": [1, 2, 3]}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False})
    file = tmp_path / "schema.json"
    file.write_text(schema)
    answers = [run("run", "What is 12 + 30?", *GREEDY, "--schema", value).out for value in (schema, str(file))]
    assert answers[0] == answers[1]
    assert json.loads(answers[0])["n"] in (1, 2, 3)


@pytest.mark.parametrize(("name", "text"), [("a.gbnf", GBNF), ("a.lark", LARK), ("a.txt", GBNF), ("a.txt", LARK)])
def test_a_grammar_is_gbnf_or_lark(run, tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert run("run", "What is 12 + 30?", *GREEDY, "--grammar", str(file)).out in ("blue\n", "green\n")


def test_the_suffix_of_a_grammar_counts_more_than_its_text(tmp_path: Path) -> None:
    for name, kind in (("a.gbnf", Gbnf), ("a.lark", Lark)):
        (tmp_path / name).write_text('start: "a ::= b"\nx ::= y\n')
        assert isinstance(read_grammar(tmp_path / name), kind)
    (tmp_path / "a.txt").write_text('start: "a ::= b"\n')
    assert isinstance(read_grammar(tmp_path / "a.txt"), Lark)


def test_choices_and_expressions(run) -> None:
    assert run("run", "2 + 3?", *GREEDY, "--choice", "tea", "--choice", "coffee").out in ("tea\n", "coffee\n")
    assert run("run", "2 + 3?", *GREEDY, "--choice", "tea").out == "tea\n"
    assert re.fullmatch(r"[xyz]{4}\n", run("run", "2 + 3?", *GREEDY, "--regex", "[xyz]{4}").out)


def test_a_constraint_begins_after_reasoning(run, model) -> None:
    with model.chat(n_ctx=512, sampling=slm.Sampling(temperature=0), thinking=True) as chat:
        free = chat.send("2 + 3?")
    outcome = run("run", "2 + 3?", "--thinking", "--regex", "[xyz]{4}", "--json", *GREEDY)
    answer = json.loads(outcome.out)
    assert free.reasoning and answer["reasoning"] == free.reasoning
    assert re.fullmatch("[xyz]{4}", answer["text"])
    for several in (("-n", "2"), ("--best-of", "2")):
        answers = json.loads(run("run", "2 + 3?", "--thinking", "--regex", "[xyz]{4}", "--json", *GREEDY, *several).out)
        assert all(re.fullmatch("[xyz]{4}", each["text"]) for each in answers["answers"])


@pytest.mark.parametrize("several", [(), ("-n", "2"), ("--best-of", "3")])
def test_a_constraint_of_a_text_that_is_continued(run, several: tuple[str, ...]) -> None:
    outcome = run("run", "--raw", "-p", "My name is", "--regex", " [A-C]da", "--json", *GREEDY, *several)
    report = json.loads(outcome.out)
    texts = [each["text"] for each in report["answers"]] if several else [report["text"]]
    assert all(re.fullmatch(" [A-C]da", text) for text in texts)


def test_a_constraint_of_a_beam_search(run) -> None:
    outcome = run("run", "2 + 3?", "--regex", "[0-9]", "--beams", "3", "-n", "3", "--json", "--backend", "native")
    texts = [each["text"] for each in json.loads(outcome.out)["answers"]]
    assert len(set(texts)) == 3 and all(re.fullmatch("[0-9]", text) for text in texts)


def test_a_constraint_of_a_chat_lasts_until_another(run, model) -> None:
    with model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0)) as chat:
        expected = [chat.send("Hello!", constraint=Regex("[xyz]{4}")).text for _ in range(2)]
        expected += [chat.send("Hello!", constraint=JsonSchema({"const": 7})).text, chat.send("Hello!").text]
    script = 'Hello!\nHello!\n/schema\n/schema {"const": 7}\nHello!\n/schema off\nHello!\n'
    outcome = run("chat", *GREEDY, "--regex", "[xyz]{4}", input=script)
    assert outcome.out.splitlines() == expected
    assert outcome.err == "Regex(pattern='[xyz]{4}')\n"


def test_a_constraint_of_a_chat_and_its_tools_exclude_each_other(run, tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text('def now() -> str:\n    """Tell the time."""\n    return "noon"\n')
    outcome = run("chat", *GREEDY, "--regex", "x", input=f"/tools {tools}\nHello!\n/schema off\nHello!\n")
    assert outcome.err.splitlines()[1].startswith("error: a constraint and tools do not go together")
    assert len(outcome.out.splitlines()) == 1
    refused = run("chat", *GREEDY, "--tools", str(tools), input='/schema {"const": 7}\n/schema\n')
    assert refused.err.splitlines()[0].startswith("error: a constraint and tools do not go together")
    assert refused.err.splitlines()[1] == "(answers are free)"


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--schema", "{}", "--regex", "x"), "--schema and --regex do not go together"),
        (("--choice", "x", "--grammar", "none"), "--choice and --grammar do not go together"),
        (("--regex", "x", "--tools", "{tools}"), "a constraint and tools do not go together"),
        (("--choice", "x", "--choice", "x"), "all different and not empty"),
        (("--schema", "{"), "error: "),
        (("--schema", '{"type": "nosuch"}'), "nosuch"),
        (("--schema", "no-such.json"), "No such file or directory"),
        (("--grammar", "no-such.gbnf"), "No such file or directory"),
        (("--grammar", "{binary}"), "is not UTF-8 text"),
        (("--regex", "("), "error: "),
    ],
)
def test_an_invalid_constraint_is_one_line(run, tmp_path: Path, command: str, flags, message: str) -> None:
    (tmp_path / "tools.json").write_text('{"name": "now", "parameters": {}}')
    (tmp_path / "binary").write_bytes(b"\xff\xfd")
    named = {"{tools}": str(tmp_path / "tools.json"), "{binary}": str(tmp_path / "binary")}
    prompt = ("-p", "Hello!") if command == "run" else ()
    outcome = run(command, *prompt, *GREEDY, *(named.get(flag, flag) for flag in flags))
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch(r"error: [^\n]+\n", outcome.err), outcome.err
    assert message in outcome.err


@pytest.mark.skipif(os.name == "nt", reason="a device of Linux and macOS")
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "-p", "Hello!", "--schema", "{device}"),
        ("run", "-p", "Hello!", "--grammar", "{device}"),
        ("run", "-p", "Hello!", "--template", "{device}"),
        ("run", "-p", "Hello!", "--tools", "{device}"),
        ("chat", "--session", "{device}"),
        ("template", "--messages", "{device}"),
        ("template", "--messages", "{messages}", "--template", "{device}"),
        ("score", "{device}"),
    ],
    ids=lambda arguments: " ".join((arguments[0], arguments[-2])),
)
def test_a_device_is_not_read(run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A device such as /dev/zero has no end."""
    device = tmp_path / "device"
    device.symlink_to(os.devnull)
    (tmp_path / "messages").write_text('[{"role": "user", "content": "Hi"}]')
    named = {"{device}": str(device), "{messages}": str(tmp_path / "messages")}
    outcome = run(*(named.get(each, each) for each in arguments))
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch(r"error: [^\n]*not a regular file[^\n]*\n", outcome.err), outcome.err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
def test_a_schema_from_a_pipe(run, tmp_path: Path) -> None:
    """A shell's ``<(command)`` is a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"const": 7}',))
    writer.start()
    assert run("run", "-p", "Hello!", *GREEDY, "--schema", str(pipe)).out == "7\n"
    writer.join()
