"""Tools, drafts and templates on the command line, compared with the Python API."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import slm_core as slm
from mtp_models import predictable_model
from slm_core.toolschema import tool_schema

GREEDY = ("--backend", "native", "--temperature", "0")
DEMO = str(slm.demo_model_path())
QUESTION = "What is the weather in Paris?"
TEMPLATE = """\
<|im_start|>system
You are a pirate named {{ messages | length }}.<|im_end|>
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def get_weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: the city.
    """
    return "The weather in " + city + " is sunny."


SOURCE = '''
def get_weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: the city.
    """
    return "The weather in " + city + " is sunny."
'''


@pytest.fixture(scope="module")
def model() -> slm.Model:
    return slm.load(slm.demo_model_path(), backend="native")


@pytest.fixture
def chat(model):
    with model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0)) as chat:
        yield chat


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(SOURCE)
    return str(tmp_path / "tools.py")


@pytest.fixture
def schemas(tmp_path: Path) -> str:
    (tmp_path / "tools.json").write_text(json.dumps([tool_schema(get_weather)]))
    return str(tmp_path / "tools.json")


def test_run_calls_functions_and_prints_the_final_answer(run, chat, functions: str) -> None:
    expected = chat.send(QUESTION, tools=[get_weather])
    assert expected.results, "the demo model calls this tool"
    outcome = run("run", QUESTION, *GREEDY, "--tools", functions)
    assert (outcome.code, outcome.out) == (0, expected.text + "\n")
    assert outcome.err == 'get_weather({"city": "Paris"}) -> The weather in Paris is sunny.\n'
    report = json.loads(run("run", QUESTION, *GREEDY, "--tools", functions, "--json").out)
    assert (report["text"], report["tool_calls"]) == (expected.text, [])
    (result,) = report["tool_results"]
    assert (result["name"], result["arguments"], result["failed"]) == ("get_weather", {"city": "Paris"}, False)
    assert result["content"] == expected.results[0].content


def test_run_prints_calls_of_schemas(run, chat, schemas: str) -> None:
    (call,) = chat.send(QUESTION, tools=[tool_schema(get_weather)]).tool_calls
    outcome = run("run", QUESTION, *GREEDY, "--tools", schemas)
    assert (outcome.code, outcome.out, outcome.err) == (0, 'get_weather({"city": "Paris"})\n', "")
    report = json.loads(run("run", QUESTION, *GREEDY, "--tools", schemas, "--json").out)
    assert report["finish_reason"] == "tool_calls"
    (called,) = report["tool_calls"]
    assert (called["name"], called["arguments"]) == (call.name, call.arguments)


def test_a_chat_begins_with_tools(run, chat, functions: str, tmp_path: Path) -> None:
    expected = chat.send(QUESTION, tools=[get_weather]).text
    outcome = run("chat", *GREEDY, "--tools", functions, input=f"{QUESTION}\n/tools off\n")
    assert outcome.out.splitlines() == ['get_weather({"city": "Paris"}) -> The weather in Paris is sunny.', expected]
    assert outcome.err == "(no tools)\n"
    file = str(tmp_path / "talk.session")
    run("chat", *GREEDY, "--session", file, input="Hello!\n")
    again = run("chat", *GREEDY, "--session", file, "--tools", functions, input=f"{QUESTION}\n")
    assert "get_weather" in again.out, "tools of the command line replace those of the file"


@pytest.mark.parametrize(("flags", "drafter"), [(("--draft", DEMO), "model"), (("--lookup",), "lookup")])
def test_drafts_do_not_change_the_answer(run, chat, flags: tuple[str, ...], drafter: str) -> None:
    """The draft model is the model itself: with the greedy choice it drafts the answer."""
    question = "My name is Ada. My name is Ada. What is my name?"
    expected = chat.send(question).text
    report = json.loads(run("run", question, *GREEDY, *flags, "--json").out)
    drafts = report["speculation"]
    assert report["text"] == expected
    assert 0 <= drafts["accepted"] <= drafts["drafted"]
    if drafter == "model":
        assert drafts["accepted"] > 0
    outcome = run("run", question, *GREEDY, *flags, "--stats")
    assert outcome.out == expected + "\n"
    assert re.search(r", \d+ tokens drafted, \d+ accepted", outcome.err)
    plain = run("run", question, *GREEDY, "--stats")
    assert "drafted" not in plain.err
    raw = [
        run("run", "--raw", "-p", "My name is", "--max-tokens", "12", *GREEDY, *options).out for options in (flags, ())
    ]
    assert raw[0] == raw[1]


def test_drafts_of_the_models_own_layer(run, tmp_path: Path) -> None:
    """Each token follows from the one before, and the layer for multi-token prediction knows it."""
    model = str(predictable_model(tmp_path / "predictable.gguf"))
    raw = ("run", model, "--raw", "-p", "Hello", "--max-tokens", "60", *GREEDY, "--json")
    plain, drafted = (json.loads(run(*raw, *flags).out) for flags in ((), ("--draft", "mtp")))
    assert drafted["text"] == plain["text"]
    assert plain["speculation"] is None and drafted["speculation"]["drafted"] >= drafted["speculation"]["accepted"] >= 0
    refused = run("run", DEMO, "Hello!", *GREEDY, "--draft", "mtp")
    assert refused.err.startswith("error: drafter 'mtp': this context does not declare mtp")


def test_lookup_copies_from_the_prompt(run, chat) -> None:
    chat.send("My dog is called Rex.")
    expected = chat.send("What is my dog called?").text
    outcome = run("chat", *GREEDY, "--lookup", "--stats", input="My dog is called Rex.\nWhat is my dog called?\n")
    assert outcome.out.splitlines()[-1] == expected
    assert re.search(r"[1-9]\d* tokens drafted", outcome.err.splitlines()[-1])


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ((), True),
        (("--seed", "3"), False),
        (("--temperature", "0"), False),
        (("--seed", "3", "--lookup"), True),
        (("--no-lookup",), False),
        (("--draft", DEMO, "--no-lookup"), True),
    ],
)
def test_answers_that_are_drawn_without_a_seed_copy_drafts_by_default(
    run, flags: tuple[str, ...], *, drafts: bool
) -> None:
    report = json.loads(run("run", DEMO, "Hello!", "--backend", "native", *flags, "--json").out)
    assert (report["speculation"] is not None) == drafts
    talk = run("chat", "--backend", "native", *flags, "--stats", input="Hello!\n")
    assert ("tokens drafted" in talk.err) == drafts


def test_a_chat_that_gets_a_seed_stops_copying_drafts(run) -> None:
    outcome = run("chat", "--backend", "native", "--stats", input="Hello!\n/set seed 3\nHello!\n")
    first, second = outcome.err.splitlines()
    assert "tokens drafted" in first and "tokens drafted" not in second


def test_drafts_of_a_chat_use_its_larger_context(run) -> None:
    """The history is longer than the first context, so that the first drafter cannot read it."""
    question = "My name is Ada. " * 12 + "What is my name?"
    script = f"/set ctx 512\n{question}\n"
    outcome = run("chat", *GREEDY, "--draft", DEMO, "--stats", "--ctx", "64", input=f"Hello!\n{script}")
    assert len(re.findall(r"[1-9]\d* tokens drafted, [1-9]\d* accepted", outcome.err)) == 2


def test_drafts_of_a_chat_survive_another_context_and_another_engine(run, chat) -> None:
    expected = [chat.send(text).text for text in ("My name is Ada.", "What is my name?", "Hello!")]
    script = "My name is Ada.\n/set ctx 512\nWhat is my name?\n/backend llamacpp\nHello!\n"
    outcome = run("chat", *GREEDY, "--draft", DEMO, "--stats", input=script)
    if "is not installed" in outcome.err:
        pytest.skip("backend llamacpp is not installed")
    assert outcome.out.splitlines() == expected
    assert len(re.findall(r"[1-9]\d* tokens drafted, [1-9]\d* accepted", outcome.err)) == 3


def test_a_template_replaces_the_models(run, tmp_path: Path) -> None:
    file = tmp_path / "pirate.jinja"
    file.write_text(TEMPLATE)
    with slm.load(DEMO, backend="native", chat_template=TEMPLATE) as model:
        expected = model.chat(n_ctx=512, sampling=slm.Sampling(temperature=0)).send("What is your name?")
    report = json.loads(run("run", "What is your name?", *GREEDY, "--template", str(file), "--json").out)
    assert (report["text"], report["usage"]["prompt_tokens"]) == (expected.text, expected.usage.prompt_tokens)
    talk = run("chat", *GREEDY, "--template", str(file), "--stats", input="What is your name?\n")
    assert talk.out == expected.text + "\n"
    assert talk.err.startswith(f"{expected.usage.prompt_tokens} prompt tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "-p", "x", "--draft", DEMO, "--lookup"), "--draft and --lookup do not go together"),
        (("chat", "--draft", DEMO, "--lookup"), "--draft and --lookup do not go together"),
        (("run", "-p", "x", "--draft", "no-such.gguf"), "no-such.gguf: no such file"),
        (("run", "-p", "x", "--lookup", "-n", "2"), "--lookup goes with one answer"),
        (("run", "-p", "x", "--draft", DEMO, "--beams", "2"), "--draft goes with one answer"),
        (("run", "-p", "x", "--tools", "t.py", "--best-of", "2"), "--tools goes with one answer"),
        (("run", "-p", "x", "--tools", "t.py", "--raw"), "--raw continues a plain text"),
        (("run", "-p", "x", "--template", "t.jinja", "--suffix", "y"), "--suffix continues a plain text"),
        (("run", "-p", "x", "--tools", "t.py"), "t.py: no such file"),
        (("chat", "--tools", "t.json"), "No such file or directory"),
        (("run", "-p", "x", "--template", "t.jinja", "--format", "chatml"), "--template and --format do not go"),
        (("chat", "--template", "t.jinja", "--format", "chatml"), "--template and --format do not go"),
        (("run", "-p", "x", "--template", "no-such.jinja"), "No such file or directory"),
    ],
)
def test_flags_that_do_not_work_are_one_line(run, arguments: tuple[str, ...], message: str) -> None:
    outcome = run(*arguments, *GREEDY)
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch(r"error: [^\n]+\n", outcome.err), outcome.err
    assert message in outcome.err
