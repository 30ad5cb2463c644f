"""The harness's own evaluation of small local tasks, against log probabilities that the tests compute themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slm_core as slm
from slm_core.types import Pos

lm_eval = pytest.importorskip("lm_eval", reason="it has the tasks: pip install 'slm-core[eval]'")

CHOICES = [
    {"question": "What is 12 + 30?", "choices": ["42", "17", "a dog"], "answer": 0},
    {"question": "What is 20 + 5?", "choices": ["three", "25", "7 and more"], "answer": 1},
    {"question": "The dog", "choices": ["is", "qx", "zz 9"], "answer": 0},
]
SUMS = [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"} for a, b in ((12, 30), (20, 5), (7, 8))]
TEXTS = [{"text": "My dog is old. " * 3}, {"text": "What is 12 + 30? " * 40}]


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], **options: object) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **options,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    mean = {"aggregation": "mean", "higher_is_better": True}
    write_task(
        folder,
        "tiny_choice",
        CHOICES,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}",
        metric_list=[{"metric": "acc", **mean}],
    )
    write_task(
        folder,
        "tiny_sums",
        SUMS,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        metric_list=[{"metric": "exact_match", **mean}],
    )
    write_task(
        folder,
        "tiny_text",
        TEXTS,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    return folder


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend="native") as model:
        yield model


def evaluated(model: slm.Model, tasks: Path, name: str, n_ctx: int = 256, **options: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    from slm_core.evaluation import HarnessModel

    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=HarnessModel(model, n_ctx=n_ctx),
        tasks=[name],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return results


def log_probabilities(model: slm.Model, tokens: list[int]) -> np.ndarray:
    """Of each token after the first one, in one batch."""
    with model.new_context(n_ctx=512) as context:
        batch = context.new_batch()
        batch.extend(tokens, Pos(0, 0), logits="all")
        rows = context.decode(batch).astype(np.float64)
    logs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    return logs[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.filterwarnings("default")
def test_choices_have_the_log_probabilities_of_the_model(model: slm.Model, tasks: Path) -> None:
    results = evaluated(model, tasks, "tiny_choice")
    n_right = 0
    for document, sample in zip(CHOICES, results["samples"]["tiny_choice"], strict=True):
        expected = []
        for choice in document["choices"]:
            context = model.vocab.encode(document["question"], add_special=True, parse_special=True)
            whole = model.vocab.encode(f"{document['question']} {choice}", add_special=True, parse_special=True)
            assert whole[: len(context)] == context
            expected.append(log_probabilities(model, whole)[len(context) - 1 :].sum())
        actual = [response[0][0] for response in sample["resps"]]
        np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3)
        n_right += int(np.argmax(expected)) == document["answer"]
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(n_right / len(CHOICES))


@pytest.mark.filterwarnings("default")
def test_answers_in_the_chat_format(model: slm.Model, tasks: Path) -> None:
    results = evaluated(model, tasks, "tiny_sums", apply_chat_template=True)
    with model.chat(n_ctx=512, sampling=slm.Sampling(temperature=0, max_tokens=24)) as chat:
        for document, sample in zip(SUMS, results["samples"]["tiny_sums"], strict=True):
            with chat.fork() as fork:
                assert sample["resps"][0][0] == fork.send(document["question"]).text
    right = np.mean([sample["resps"][0][0] == sample["doc"]["answer"] for sample in results["samples"]["tiny_sums"]])
    assert results["results"]["tiny_sums"]["exact_match,none"] == pytest.approx(right)
    assert right == 1.0


@pytest.mark.filterwarnings("default")
def test_adapters_and_kv_types(run: Any, model: slm.Model, tasks: Path, tmp_path: Path) -> None:
    """Answers and log probabilities are those of a session with the same options."""
    pirate = str(slm.demo_adapter_path())
    flags = ("--lora", pirate, "--kv-type", "q4_0", "--include-path", str(tasks), "--backend", "native")
    output = tmp_path / "out.json"
    done = run("eval", "--tasks", "tiny_choice,tiny_sums", *flags, "--ctx", "256", "--output", str(output))
    assert done.code == 0, done.err
    samples = json.loads(output.read_text())["samples"]
    greedy = slm.Sampling.preset("neutral", temperature=0, max_tokens=24, stop=("\n\n",))
    model.adapters.load(pirate, "pirate")
    options: dict[str, Any] = {"kv_type_k": "q4_0", "kv_type_v": "q4_0", "adapters": {"pirate": 1.0}}
    try:
        question = model.vocab.encode(SUMS[0]["question"], add_special=True, parse_special=True)
        assert samples["tiny_sums"][0]["resps"][0][0] == model.generate([question], greedy, **options)[0].text
        question = model.vocab.encode(CHOICES[0]["question"], add_special=True, parse_special=True)
        whole = model.vocab.encode("What is 12 + 30? 42", add_special=True, parse_special=True)
        totals = []
        for chosen in (options, options | {"adapters": None}, {"adapters": {"pirate": 1.0}}):
            with model.session(n_ctx=256, **chosen) as session:
                session.append_tokens(question)
                totals.append(session.score(whole[len(question) :]).total)
    finally:
        model.adapters.unload("pirate")
    actual = float(samples["tiny_choice"][0]["resps"][0][0][0])
    assert actual == pytest.approx(totals[0], abs=1e-4)
    assert all(abs(actual - other) > 1e-3 for other in totals[1:])


@pytest.mark.filterwarnings("default")
def test_texts_are_scored_whole(model: slm.Model, tasks: Path) -> None:
    """The second text is longer than the context: each token is scored once, with as much before it as fits."""
    results = evaluated(model, tasks, "tiny_text", n_ctx=128)
    short, long = (sample["resps"][0][0] for sample in results["samples"]["tiny_text"])
    prefix = model.vocab.eos if model.vocab.bos is None else model.vocab.bos
    tokens = model.vocab.encode(TEXTS[0]["text"], add_special=False, parse_special=False)
    assert short == pytest.approx(log_probabilities(model, [prefix, *tokens]).sum(), rel=1e-3)
    tokens = model.vocab.encode(TEXTS[1]["text"], add_special=False, parse_special=False)
    assert len(tokens) > 128
    whole = log_probabilities(model, [prefix, *tokens]).sum()
    assert long == pytest.approx(whole, rel=0.2)
    assert long < short


@pytest.mark.filterwarnings("default")
def test_the_command(run: Any, tasks: Path, tmp_path: Path) -> None:
    options = ("--include-path", str(tasks), "--backend", "native", "--ctx", "256")
    done = run(
        "eval",
        "--tasks",
        "tiny_choice,tiny_sums",
        "--chat",
        "--limit",
        "2",
        *options,
        "--json",
        "--output",
        str(tmp_path / "out.json"),
    )
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["n-samples"]["tiny_sums"]["effective"] == 2
    for bar in ("Tokenizing inputs", "Scoring", "answers"):
        assert bar not in done.err, "standard error is no terminal"
    assert facts["results"]["tiny_sums"]["exact_match,none"] == 1.0
    assert len(json.loads((tmp_path / "out.json").read_text())["samples"]["tiny_choice"]) == 2
    table = run("eval", "--tasks", "tiny_sums", "--chat", *options).out
    assert "|tiny_sums|" in table
    assert run("eval", "--tasks", ",", *options).err == "error: --tasks names no task\n"


@pytest.mark.filterwarnings("default")
def test_results_are_shown_though_their_file_cannot_be_written(
    run: Any, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise slm.InvalidOption("the disk is full")

    monkeypatch.setattr("slm_core.cli.evaluate.write_whole", full)
    options = ("--include-path", str(tasks), "--backend", "native", "--ctx", "256", "--json")
    done = run("eval", "--tasks", "tiny_choice", *options, "--output", str(tmp_path / "out.json"))
    assert (done.code, "disk is full" in done.err, "tiny_choice" in json.loads(done.out)["results"]) == (1, True, True)


def test_libraries_show_progress_bars_only_in_terminals() -> None:
    """The harness has bars that no argument disables. tqdm reads its variable when it is imported: in a new process."""
    code = """
from slm_core.cli.evaluate import _show_bars_only_in_terminals
_show_bars_only_in_terminals()
from tqdm import tqdm
print(sum(tqdm([1, 2])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_a_missing_folder_is_named_before_the_model_is_loaded(run: Any, tmp_path: Path) -> None:
    output = tmp_path / "none" / "out.json"
    refused = run("eval", "no-such-model.gguf", "--tasks", "x", "--output", str(output))
    assert (refused.code, refused.err) == (1, f"error: {output}: there is no folder {output.parent}\n")


@pytest.mark.filterwarnings("default")
def test_an_unknown_task_is_named(run: Any) -> None:
    unknown = run("eval", "--tasks", "arc_easy,never")
    assert (unknown.code, unknown.err) == (1, "error: unknown tasks: never (lm_eval ls tasks lists all)\n")


def test_unknown_options_of_a_task_are_refused(model: slm.Model) -> None:
    from slm_core.evaluation import _sampling

    with pytest.raises(slm.InvalidOption, match="the task asks for best_of"):
        _sampling({"best_of": 3})
    sampling = _sampling({"until": ["\n", ""], "max_gen_toks": 5})
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.0, 5, ("\n",))
