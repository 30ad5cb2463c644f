"""The commands compared with the Python API."""

from __future__ import annotations

import codecs
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import slm_core as slm
from slm_conformance.oracle.references import reference_of
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.bench import log_softmax
from slm_conformance.suite.tolerance import MEAN_MARGIN, Precision, rounding_reference
from slm_core.cli.app import app
from slm_core.diskcache import DiskCache
from slm_core.gguf import GgufFile
from slm_core.loading import demo_model_path
from tests.hostile import folders

Run = Callable[..., object]
NATIVE = ("--backend", "native", "--temperature", "0")
COMMANDS = (
    "demo",
    "run",
    "chat",
    "info",
    "backends",
    "tokenize",
    "template",
    "bench",
    "cache",
    "convert",
    "score",
    "embed",
    "eval",
    "serve",
    "conformance",
    "quantize",
    "rerank",
    "lora",
    "list",
    "pull",
    "rm",
    "new-backend",
)


@pytest.fixture(scope="module")
def model() -> slm.Model:
    return slm.load(slm.demo_model_path(), backend="native")


def test_help_lists_every_command_with_an_example(run) -> None:
    assert sorted(typer.main.get_command(app).list_commands(None)) == sorted(COMMANDS)
    overview = run("--help").out
    for command in COMMANDS:
        assert re.search(rf"^\W*{command} ", overview, re.MULTILINE), f"slm --help does not list {command}"
        assert f"Example: slm {command}" in run(command, "--help").out
    assert "130 interrupted" in overview


def test_version(run) -> None:
    assert re.fullmatch(r"slm \d+\.\d+\.\d+\S*\n", run("--version").out)


def test_run_answers_like_the_api(run, model) -> None:
    chat = model.chat(system="You are terse.", n_ctx=512, sampling=slm.Sampling(temperature=0))
    expected = chat.send("What is 12 + 30?")
    outcome = run("run", "-p", "What is 12 + 30?", "-s", "You are terse.", "--stats", *NATIVE)
    assert (outcome.code, outcome.out) == (0, expected.text + "\n")
    assert f"{expected.usage.prompt_tokens} prompt tokens" in outcome.err

    piped = run("run", "-s", "You are terse.", "--json", *NATIVE, input="What is 12 + 30?")
    answer = json.loads(piped.out)
    assert answer["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert answer["finish_reason"] == "stop"


def test_run_isolated(run, model) -> None:
    chat = model.chat(n_ctx=512, sampling=slm.Sampling(temperature=0))
    expected = chat.send("What is 12 + 30?").text + "\n"
    assert run("run", "-p", "What is 12 + 30?", "--isolated", *NATIVE).out == expected


def test_run_passes_options_to_the_generation(run, model) -> None:
    limited = json.loads(run("run", "-p", "Hello!", "--max-tokens", "2", "--json", *NATIVE).out)
    assert (limited["usage"]["completion_tokens"], limited["finish_reason"]) == (2, "length")

    draws = (
        "--seed",
        "7",
        "--temperature",
        "2",
        "--top-k",
        "0",
        "--top-p",
        "1",
        "--min-p",
        "0.01",
        "--max-tokens",
        "9",
    )
    sampling = slm.Sampling(seed=7, temperature=2.0, top_k=0, top_p=1.0, min_p=0.01, max_tokens=9)
    drawn = run("run", "-p", "Hello!", "--backend", "native", "--ctx", "256", *draws).out
    assert drawn == model.chat(n_ctx=256, sampling=sampling).send("Hello!").text + "\n"


def test_every_sampling_option_can_be_passed(run, model) -> None:
    sampling = slm.Sampling.preset("creative", seed=7, max_tokens=9, min_p=0.01, dry_multiplier=0.8, stop=("!",))
    flags = ("--preset", "creative", "--seed", "7", "--min-p", "0.01", "-S", "max_new_tokens=9")
    flags = (*flags, "-S", "dry_multiplier=0.8", "-S", 'stop=["!"]')
    drawn = run("run", "-p", "Hello!", "--backend", "native", "--ctx", "256", *flags).out
    assert drawn == model.chat(n_ctx=256, sampling=sampling).send("Hello!").text + "\n"


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_without_a_scored_token_has_neither_perplexity_nor_bits(run, text: str) -> None:
    shown = json.loads(run("score", "-", "--json", "--backend", "native", input=text).out)
    assert (shown["tokens"], shown["perplexity"], shown["bits_per_byte"]) == (0, None, None)


@pytest.mark.parametrize(
    "command", [("embed", str(demo_model_path()), "-"), ("tokenize", "-"), ("template",), ("run",)]
)
def test_standard_input_that_is_not_text(run, command) -> None:
    outcome = run(*command, input=b"caf\xe9 au lait")
    message = "error: standard input is not UTF-8 text: invalid continuation byte at byte 3\n"
    assert (outcome.code, outcome.err) == (1, message)


def test_a_byte_order_mark_is_no_text(run, tmp_path) -> None:
    messages = '[{"role": "user", "content": "café"}]'.encode()
    (tmp_path / "messages.json").write_bytes(codecs.BOM_UTF8 + messages)
    plain, marked = (run("template", "--messages", "-", input=text) for text in (messages, codecs.BOM_UTF8 + messages))
    assert plain.out == marked.out == run("template", "--messages", str(tmp_path / "messages.json")).out
    assert "café" in plain.out


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_of_powershell_is_refused_with_its_cure(run, tmp_path, encoding: str) -> None:
    (tmp_path / "grammar.gbnf").write_bytes('\ufeffroot ::= "x"'.encode(encoding))
    outcome = run("run", "-p", "Hello!", "--grammar", str(tmp_path / "grammar.gbnf"))
    assert (outcome.code, outcome.out) == (1, "")
    assert "grammar.gbnf is UTF-16 text (accepted: UTF-8, which PowerShell writes with Set-Content" in outcome.err


def test_bytes_of_standard_input_are_scored_as_those_of_a_file(run, tmp_path) -> None:
    text = b"caf\xe9 au lait"
    (tmp_path / "text").write_bytes(text)
    shown = [run("score", name, "--json", "-b", "native", input=text).out for name in (str(tmp_path / "text"), "-")]
    assert shown[0] == shown[1] != ""


def test_info_shows_the_whole_path(run, tmp_path) -> None:
    path = tmp_path / ("long " + "n" * 150) / "model.gguf"
    path.parent.mkdir()
    path.symlink_to(slm.demo_model_path())
    shown = run("info", str(path)).out
    assert str(path).replace(" ", "") in re.sub(r"\s", "", shown)


def test_score_is_the_perplexity_of_a_file(run, model, tmp_path) -> None:
    text = "My dog is called Rex. What is 12 + 30? " * 8
    (tmp_path / "text.txt").write_text(text)
    ids, weights = model.vocab.encode(text, add_special=True, parse_special=False), Weights.read(demo_model_path())
    exact, rounded = (
        log_softmax(way.decode(ids[:-1]))[np.arange(len(ids) - 1), ids[1:]]
        for way in (reference_of(weights), rounding_reference(weights, Precision.QUANTIZED))
    )
    total = exact.sum()
    shown = json.loads(run("score", str(tmp_path / "text.txt"), "--json", "--backend", "native").out)
    assert shown["tokens"] == len(ids) - 1
    # Clause 9 allows 1.2 times the error of 8-bit activations. Here that is 0.5 % of the sum.
    allowed = MEAN_MARGIN * np.abs(rounded - exact).sum()
    assert shown["logprob"] == pytest.approx(total, abs=allowed)
    assert shown["perplexity"] == pytest.approx(math.exp(-shown["logprob"] / (len(ids) - 1)))
    assert shown["bits_per_byte"] == pytest.approx(-shown["logprob"] / math.log(2) / len(text))
    line = run("score", str(tmp_path / "text.txt"), "--backend", "native").out
    assert line.startswith(f"perplexity {shown['perplexity']:.4f}, ")


def test_run_raw_continues_the_text(run, model) -> None:
    session = model.session(n_ctx=256, sampling=slm.Sampling(temperature=0, max_tokens=8))
    session.append("My name is")
    expected = session.generate().run().text
    assert run("run", "--raw", "-p", "My name is", "--max-tokens", "8", *NATIVE).out == expected + "\n"


def test_run_shows_reasoning_before_the_answer(run, model) -> None:
    answer = model.chat(sampling=slm.Sampling(temperature=0, max_tokens=60), n_ctx=512, thinking=True).send("2 + 3?")
    outcome = run("run", "-p", "2 + 3?", "--thinking", "--max-tokens", "60", *NATIVE)
    assert answer.reasoning, "the demo model reasons with --thinking"
    assert outcome.out == "\n\n".join(filter(None, (answer.reasoning, answer.text))) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "no-such-file.gguf", "-p", "hi"), "no-such-file.gguf: no such file"),
        (("info", "no-such-file.gguf"), "no-such-file.gguf: no such file"),
        (("tokenize", "no-such-file.gguf", "hi"), "no-such-file.gguf: no such file"),
        (("info", "backends"), "backends: a directory without a config.json"),
        (("info", "slm_core/data"), "a config.json, but with GGUF files (such as demo.gguf): give the path of one"),
        (("run", "-p", "hi", "--backend", "nosuch"), "unknown backend 'nosuch' (registered: "),
        (("run", "-p", "hi", "--backend", "native", "--option", "nosuch=1"), "nosuch"),
        (("run", "-p", "hi", "--option", "novalue"), "'novalue' (accepted: KEY=VALUE)"),
        (("run", "-p", "hi", "--temperature", "-1"), "temperature=-1.0 (accepted: "),
        (("run", "-p", "hi", "--preset", "wild"), "unknown preset 'wild' (accepted: greedy, "),
        (("run", "-p", "hi", "-S", "tempo=1"), "unknown sampling option 'tempo' (accepted: "),
        (("run", "-p", "hi", "-S", "temperature"), "--sampling 'temperature' (accepted: KEY=VALUE)"),
        (("run", "-p", "hi", "--top-k", "3", "-S", "top_k=3"), "'top_k' is given twice"),
        (("run", "-p", "hi", "-S", "logprobs=3"), "commands do not show log-probabilities"),
        (("score", "no-such-file.txt"), "no-such-file.txt"),
        (("run", "-p", "hi", "--format", "nosuch", *NATIVE), "unknown chat format 'nosuch' (registered: "),
        (("run", "-p", "hi", "--raw", "--system", "x"), "do not go with it"),
        (("run", "-p", "hi " * 3000, "--ctx", "100", *NATIVE), "the context is full"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(run, arguments: tuple[str, ...], message: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 1
    assert outcome.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", outcome.err), outcome.err
    assert message in outcome.err


@pytest.mark.parametrize(
    "arguments", [("nosuch",), ("run", "--nosuch"), ("tokenize", "a", "b", "c"), ("bench", "--rounds", "0")]
)
def test_wrong_usage_is_exit_code_2(run, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Usage: slm" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--debug", "info", "no-such-file.gguf"),
        ("info", "--debug", "no-such-file.gguf"),
        ("info", "no-such-file.gguf", "--debug"),
        ("conformance", "--backend", "no-such-backend", "--debug"),
    ],
)
def test_debug_keeps_the_traceback_anywhere(arguments: tuple[str, ...]) -> None:
    with pytest.raises(slm.SlmError):  # the runner re-raises errors that would print a traceback
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_debug_as_a_value_is_no_option(run) -> None:
    outcome = run("run", "no-such-file.gguf", "-p", "--debug")
    assert (outcome.code, outcome.err) == (1, "error: no-such-file.gguf: no such file\n")


def test_info_prints_the_facts_of_the_file(run, model) -> None:
    facts = json.loads(run("info", "--json").out)
    with GgufFile.open(slm.demo_model_path()) as file:
        assert facts["architecture"] == file.require("general.architecture", str)
    assert facts["parameters"] == model.info.n_params
    assert facts["fingerprint"] == model.info.fingerprint
    assert facts["backends"]["native"] is None
    assert facts["state_kv_type"] == "f16"
    assert facts["pooling"] is None
    with slm.load(slm.demo_model_path(), backend="native", tier="reference") as exact:
        assert facts["state_bytes_per_token"] * 2 == exact.info.state_bytes_per_token, "the default is f32"
    assert facts["state_bytes_per_sequence"] == model.info.state_bytes_per_sequence == 0
    assert facts["state_bytes_per_token_swa"] is facts["state_bytes_per_sequence_swa"] is None, (
        "no layer has a sliding window"
    )
    shown = run("info").out
    assert re.search(rf"^parameters +{model.info.n_params:,} *$", shown, re.MULTILINE)
    assert re.search(r"^runs on native +yes *$", shown, re.MULTILINE)


def test_backends_lists_all_backends_and_missing_packages(run, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [
        slm.BackendStatus("here", installed=True, version="1.2", reason="tier fast"),
        slm.BackendStatus("there", installed=False, reason="no runtime", hint="pip install there"),
    ]
    monkeypatch.setattr("slm_core.cli.inspect.list_backends", lambda: statuses)
    shown = run("backends").out
    assert re.search(r"^here +yes +1\.2 +tier fast", shown, re.MULTILINE)
    assert re.search(r"^there +no +no runtime \(to get it: pip install there\)", shown, re.MULTILINE)
    assert [status["name"] for status in json.loads(run("backends", "--json").out)] == ["here", "there"]


@pytest.mark.parametrize("special", [False, True])
def test_tokenize_prints_the_ids_of_the_vocabulary(run, special: bool) -> None:
    text = "Héllo <|im_end|> 日本"
    ids = slm.load_vocab(slm.demo_model_path()).encode(text, add_special=False, parse_special=special)
    flags = ("--special",) if special else ()
    assert run("tokenize", text, "--ids", *flags).out.split() == [str(token) for token in ids]
    report = json.loads(run("tokenize", str(slm.demo_model_path()), "-", "--json", *flags, input=text).out)
    assert report["ids"] == ids
    assert bytes.fromhex("".join(report["bytes"])).decode() == text
    assert [line.split()[0] for line in run("tokenize", text, *flags).out.splitlines()] == [str(token) for token in ids]


def test_bench_reports_every_round(run) -> None:
    sizes = ("--prompt-tokens", "20", "--new-tokens", "4", "--rounds", "3", "--backend", "native")
    report = json.loads(run("bench", "--json", *sizes).out)
    assert (report["prompt_tokens"], report["new_tokens"]) == (20, 4)
    for name in ("prefill", "decode"):
        assert len(report[name]) == 3
        assert report[f"{name}_median"] == statistics.median(report[name]) > 0
    shown = run("bench", *sizes).out
    assert re.search(r"^prefill +20 +[\d.]+ +[\d.]+ +[\d.]+ *$", shown, re.MULTILINE)


def test_output_of_a_pipe_is_plain(run) -> None:
    for arguments in (
        ("backends",),
        ("info",),
        ("run", "-p", "Hello!", *NATIVE),
        ("bench", "--rounds", "1", "--prompt-tokens", "4", "--backend", "native"),
    ):
        outcome = run(*arguments)
        assert "\x1b" not in outcome.out + outcome.err, f"slm {arguments[0]} writes escape sequences into a pipe"


def test_conformance_runs_the_suite(run, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = pytest.importorskip("slm_conformance")
    calls = []

    def fake(backend: str, *, model: Path | None, device: str, reports: Sequence[Path], **more: float) -> int:
        calls.append((backend, model, device, reports, more))
        return 1

    monkeypatch.setattr(suite, "run", fake, raising=False)
    assert run("conformance", "--backend", "native", "--device", "cpu").code == 1
    assert run("conformance", "-b", "native", "--report", "a.html", "--report", "b.svg").code == 1
    assert run("conformance", "-b", "native", "--isolated", "--quick", "--budget", "2.5", "--seed", "7").code == 1
    usual, quick = (
        {"isolated": False, "quick": False, "budget": 0, "seed": 0},
        {"isolated": True, "quick": True, "budget": 2.5, "seed": 7},
    )
    assert calls == [
        ("native", None, "cpu", (), usual),
        ("native", None, "auto", [Path("a.html"), Path("b.svg")], usual),
        ("native", None, "auto", (), quick),
    ]


def test_an_unknown_report_format_is_wrong_usage(run) -> None:
    pytest.importorskip("slm_conformance")
    outcome = run("conformance", "--backend", "native", "--report", "x.pdf")
    assert outcome.code == 2
    assert ".html, .json, .svg" in outcome.err


def test_a_scenario_is_explained_as_a_script(run) -> None:
    pytest.importorskip("slm_conformance")
    toy = ("conformance", "--backend", "slm_conformance.toy:ToyBackend")
    outcome = run(*toy, "--explain", "TestCut::test_of_a_fork[llama-f32]")
    assert outcome.code == 0
    assert outcome.out.startswith("# TestCut::test_of_a_fork. ")
    compile(outcome.out, "script", "exec")
    typo = run(*toy, "--explain", "TestCut::test_of_a_fok")
    assert (typo.code, "TestCut::test_of_a_fork" in typo.err) == (2, True)
    assert run(*toy, "--explain", "TestCut::test_of_a_fork", "--report", "a.html").code == 2


def test_backends_prints_why_a_device_cannot_be_used(run) -> None:
    output = run("backends", "--devices").out
    assert re.search(r"native\s+cpu\s+yes", output)
    assert re.search(r"onnx\s+cuda\s+(yes|untried|no\s+.*CUDAExecutionProvider)", output)


def test_cache_lists_and_clears(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLM_CACHE_DIR", str(tmp_path))
    assert "0 entries" in run("cache").err
    DiskCache("engine").put("key", "a model", lambda folder: (folder / "file").write_bytes(bytes(2_000_000)))
    assert re.search(r"engine\s+2\.0\s+a model", run("cache").out)
    assert json.loads(run("cache", "--json").out)[0]["about"] == "a model"
    assert "1 entries, 2.0 MB removed" in run("cache", "--clear").err
    assert DiskCache("engine").get("key") is None


def test_convert_writes_a_directory_that_answers_like_the_file(run, tmp_path) -> None:
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    folder = str(tmp_path / "demo")
    done = run("convert", str(slm.demo_model_path()), folder, "--to", "onnx")
    assert (done.code, done.out) == (0, "")
    assert "8 files" in done.err
    answers = [run("run", *named, "-p", "What is 12 + 30?", "--temperature", "0") for named in ((), (folder,))]
    assert answers[0].out == answers[1].out != ""
    ids = [run("tokenize", *named, "Hello, <|im_end|>", "--ids", "--special") for named in ((), (folder,))]
    assert ids[0].out == ids[1].out != ""
    info = json.loads(run("info", folder, "--json").out)
    assert info["backends"]["onnx"] is None
    assert "a directory" in info["backends"]["llamacpp"]
    assert "there is no model.safetensors" in info["backends"]["native"]
    assert info["vocabulary"] == slm.load_vocab(slm.demo_model_path()).size
    again = run("convert", str(slm.demo_model_path()), folder, "--to", "onnx")
    assert (again.code, "is there already" in again.err) == (1, True)
    unknown = run("convert", str(slm.demo_model_path()), folder, "--to", "paper")
    assert (unknown.code, "registered: " in unknown.err) == (1, True)


def test_embed_prints_the_vectors_of_the_api(run, model) -> None:
    texts, path = ["a dog", "another"], str(slm.demo_model_path())
    report = json.loads(run("embed", path, *texts, "--backend", "native", "--pooling", "mean").out)
    expected = model.embed(texts, pooling="mean")
    assert (report["pooling"], report["normalized"]) == ("mean", True)
    assert [row["text"] for row in report["embeddings"]] == texts
    assert [row["tokens"] for row in report["embeddings"]] == list(expected.n_tokens)
    assert np.array([row["vector"] for row in report["embeddings"]]) == pytest.approx(expected.vectors, abs=1e-6)
    lines = json.loads(run("embed", path, "-", "--no-normalize", "-b", "native", input="a dog\nanother\n").out)
    assert [row["text"] for row in lines["embeddings"]] == texts
    assert max(map(abs, lines["embeddings"][0]["vector"])) > 1, "these vectors are not normalized"
    assert run("embed", path, "-", "text").code == 2
    refused = run("embed", path, "text", "--pooling", "median", "-b", "native")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "unknown pooling 'median'" in refused.err


@pytest.mark.parametrize(
    "command",
    [
        ("info", "--json"),
        ("tokenize", "x"),
        ("template", "--json"),
        ("score", "-"),
        ("embed", "x"),
        ("run", "-p", "x"),
        ("bench", "--prompt-tokens", "4", "--new-tokens", "2", "--rounds", "1"),
        ("quantize", "out.gguf", "--type", "Q4_0", "--dry-run"),
        ("convert", "folder", "--to", "onnx"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_accepts_a_model_of_the_hub(run, command, tmp_path, monkeypatch) -> None:
    fetched = []
    monkeypatch.setattr("slm_core.paths.fetch", lambda text: fetched.append(text) or slm.demo_model_path())
    monkeypatch.chdir(tmp_path)
    name, *rest = command
    outcome = run(name, "hf://somebody/tiny:Q8_0", *rest, input="[]" if name == "template" else "A text.")
    assert outcome.code == 0, outcome.err
    assert set(fetched) <= {"hf://somebody/tiny:Q8_0", "hf:/somebody/tiny:Q8_0"}
    assert fetched


def test_a_directory_becomes_a_gguf_file(run, tmp_path, monkeypatch) -> None:
    sound = dict(folders.transformers_folders(tmp_path)[1])
    settings = json.loads(sound["tokenizer_config.json"]) | {"chat_template": "{{ bos }} hi"}
    sound["tokenizer_config.json"] = json.dumps(settings).encode()
    folder, target = folders.write(sound, tmp_path / "tiny"), tmp_path / "tiny.gguf"
    done = run("convert", str(folder), str(target), "--to", "gguf")
    assert (done.code, done.out) == (0, "")
    assert "1 file," in done.err
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert "1 file," in run("convert", str(folder), "~/home.gguf", "--to", "gguf").err
    ids = [run("tokenize", str(path), "Hello, <|im_end|>", "--ids", "--special").out for path in (folder, target)]
    assert ids[0] == ids[1] != ""
    shown = json.loads(run("info", str(target), "--json").out)
    assert shown["chat_template"] == "12 characters"
    answers = [
        run("run", str(path), "--raw", "-p", "abc", "--temperature", "0", "--max-tokens", "8", "-b", backend)
        for path, backend in ((folder, "native"), (target, "native"), (target, "llamacpp"))
    ]
    assert answers[0].out == answers[1].out == answers[2].out != ""
    again = run("convert", str(folder), str(target), "--to", "gguf")
    assert (again.code, again.err) == (1, f"error: {target}: there is a file already\n")
    of_file = run("convert", str(target), str(tmp_path / "x"), "--to", "gguf")
    assert "not a directory" in of_file.err
    refused = run("run", str(folder), "-p", "abc", "-b", "llamacpp")
    assert f"(slm convert {folder} model.gguf --to gguf writes a file)" in refused.err
    plan = json.loads(run("quantize", str(folder), "x", "--type", "Q8_0", "--dry-run", "--json").out)
    assert {tensor["type"] for tensor in plan["tensors"]} >= {"F32", "Q8_0"}
