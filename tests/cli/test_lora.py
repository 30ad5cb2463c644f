"""``slm lora``, and ``--lora`` and ``--control-vector`` of other commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from slm_core.adapters import write_control_vector
from slm_core.cli.adapters import read_lora
from slm_core.gguf import GgufFile

DEMO, PIRATE = str(slm.demo_model_path()), str(slm.demo_adapter_path())
QUESTION = "What is 12 + 30?"
GREEDY = ("--backend", "native", "--temperature", "0")


@pytest.fixture(scope="module")
def answer() -> str:
    with slm.load(DEMO, backend="native") as model:
        model.adapters.load(PIRATE, "pirate")
        sampling = slm.Sampling(temperature=0)
        with model.chat(n_ctx=512, sampling=sampling, adapters={"pirate": 1.0}) as chat:
            return chat.send(QUESTION).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.gguf", (Path("a.gguf"), 1.0)),
        ("a.gguf:0.5", (Path("a.gguf"), 0.5)),
        ("folder:-2", (Path("folder"), -2.0)),
        ("C:\\folder", (Path("C:\\folder"), 1.0)),
        ("C:\\folder:0.25", (Path("C:\\folder"), 0.25)),
    ],
)
def test_scales(text: str, expected: tuple[Path, float]) -> None:
    assert read_lora(text) == expected


def test_run(run, answer) -> None:
    with_adapter = run("run", DEMO, QUESTION, "--lora", PIRATE, *GREEDY)
    assert (with_adapter.code, with_adapter.out) == (0, answer + "\n")
    assert with_adapter.out.startswith("Arr!")
    for without in (("--lora", f"{PIRATE}:0"), ()):
        assert run("run", DEMO, QUESTION, *without, *GREEDY).out == "12 + 30 = 42\n"


def test_embed_and_score(run, tmp_path: Path) -> None:
    """The results equal those of the API with the adapter, which predicts a text of its style better."""
    text = "Arr! 12 + 30 = 42, me hearty!"
    (tmp_path / "text.txt").write_text(text)
    engine = ("--lora", PIRATE, "--backend", "native")
    with slm.load(DEMO, backend="native") as model:
        model.adapters.load(PIRATE, "pirate")
        vector = model.embed([text], adapters={"pirate": 1.0}).vectors[0]
        total, without = model.score(text, adapters={"pirate": 1.0}).total, model.score(text).total
    embedded = json.loads(run("embed", DEMO, text, *engine).out)["embeddings"][0]
    np.testing.assert_allclose(embedded["vector"], vector, atol=1e-6)
    scored = json.loads(run("score", DEMO, str(tmp_path / "text.txt"), "--json", *engine).out)["logprob"]
    assert scored == pytest.approx(total, rel=1e-6)
    assert total > without + 1  # nats


def test_chat(run, answer) -> None:
    outcome = run("chat", DEMO, "--lora", PIRATE, "--plain", *GREEDY, input=f"{QUESTION}\n/regen\n")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count(answer) == 2


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (["missing.gguf"], "missing.gguf: no such file"),
        ([f"{PIRATE}:inf"], "the scale of adapter 'demo-adapter' is inf"),
        ([PIRATE, PIRATE], "there is an adapter 'demo-adapter' already"),
        ([DEMO], "not an adapter"),
    ],
)
def test_errors_are_one_line(run, lora: list[str], words: str) -> None:
    outcome = run("run", DEMO, QUESTION, *[word for path in lora for word in ("--lora", path)], *GREEDY)
    assert outcome.code == 1
    assert words in outcome.err and outcome.err.count("\n") == 1


def test_info(run) -> None:
    facts = json.loads(run("lora", "info", DEMO, PIRATE, "--json").out)
    with GgufFile.open(PIRATE) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
    assert facts["n_params"] == sum(rows * columns for rows, columns in shapes.values())
    assert facts["rank"] == max(shape[0] for name, shape in shapes.items() if name.endswith(".lora_a"))
    assert {f"{name}.lora_{side}" for name in facts["tensors"] for side in "ab"} == set(shapes)
    shown = run("lora", "info", DEMO, PIRATE).out
    assert f"{facts['n_params']:,} parameters" in shown and "attn_v" in shown


def test_merge(run, answer, tmp_path) -> None:
    target = tmp_path / "merged.gguf"
    outcome = run("lora", "merge", DEMO, str(target), "--lora", PIRATE, "--type", "f16")
    assert outcome.code == 0, outcome.err
    assert run("run", str(target), QUESTION, *GREEDY).out == answer + "\n"
    again = run("lora", "merge", DEMO, str(target), "--lora", PIRATE)
    assert (again.code, "to replace it: force" in again.err) == (1, True)
    nothing = run("lora", "merge", DEMO, str(tmp_path / "other.gguf"))
    assert (nothing.code, "--lora" in nothing.err) == (2, True)


def test_convert(run, tmp_path) -> None:
    """A converted adapter has the same content, so dumps accept either."""
    target = tmp_path / "again.gguf"
    assert run("lora", "convert", DEMO, PIRATE, str(target)).code == 0
    fingerprints = [json.loads(run("lora", "info", DEMO, path, "--json").out)["fingerprint"]
                    for path in (PIRATE, str(target))]  # fmt: skip
    assert fingerprints[0] == fingerprints[1]
    before = target.read_bytes()
    refused = run("lora", "convert", DEMO, PIRATE, str(target))
    assert (refused.code, "--force" in refused.err) == (1, True)
    assert run("lora", "convert", DEMO, PIRATE, str(target), "--force").code == 0
    np.testing.assert_array_equal(np.frombuffer(target.read_bytes(), np.uint8), np.frombuffer(before, np.uint8))


def test_files_that_are_read_are_not_replaced(run, tmp_path) -> None:
    model, adapter = shutil.copy(DEMO, tmp_path / "m.gguf"), shutil.copy(PIRATE, tmp_path / "a.gguf")
    (tmp_path / "a.txt").write_text("My dog is very\n")
    (tmp_path / "b.txt").write_text("It is\n")
    texts = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for command in (
        ("convert", model, adapter, model),
        ("convert", model, adapter, adapter),
        ("merge", model, adapter, "--lora", adapter),
        ("vector", model, model, *texts),
        ("vector", model, texts[0], *texts),
    ):
        refused = run("lora", *map(str, command), "--force")
        assert refused.code == 1 and "the new file cannot be the one that is read" in refused.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", ["convert", "vector"])
def test_a_missing_folder_is_named(run, tmp_path, command) -> None:
    target, text = str(tmp_path / "none" / "new.gguf"), tmp_path / "text"
    text.write_text("It is\n")
    rest = (PIRATE, target) if command == "convert" else (target, str(text), str(text))
    outcome = run("lora", command, DEMO, *rest)
    assert (outcome.code, outcome.err) == (1, f"error: {target}: there is no folder {tmp_path / 'none'}\n")


@pytest.fixture(scope="module")
def vector(tmp_path_factory) -> str:
    """A control vector of the demo model."""
    rng, path = np.random.default_rng(1), tmp_path_factory.mktemp("vector") / "vector.gguf"
    write_control_vector({i: rng.standard_normal(192).astype(np.float32) for i in range(1, 6)}, path)
    return str(path)


def steered(vector: str, scale: float, layers: tuple[int, int] | None = None) -> float:
    """The log probability of a text with a control vector."""
    with slm.load(DEMO, backend="native") as model:
        model.adapters.load(vector, "v", layers=layers)
        return model.score(QUESTION, adapters={"v": scale}).total


def test_control_vector(run, vector, tmp_path) -> None:
    """As the calls with the control vector, and with some of its layers; --lora takes it, too."""
    (tmp_path / "text.txt").write_text(QUESTION)
    few = ("--control-vector-layer-range", "2", "3")
    for flags, expected in (
        (("--control-vector", f"{vector}:8"), steered(vector, 8.0)),
        (("--control-vector", f"{vector}:8", *few), steered(vector, 8.0, (2, 3))),
        (("--lora", f"{vector}:-8"), steered(vector, -8.0)),
        ((), steered(vector, 0.0)),
    ):
        outcome = run("score", DEMO, str(tmp_path / "text.txt"), "--json", "--backend", "native", *flags)
        assert json.loads(outcome.out)["logprob"] == pytest.approx(expected, rel=1e-6), flags
    assert abs(steered(vector, 8.0) - steered(vector, 8.0, (2, 3))) > 1  # nats


def test_wrong_flags_of_control_vectors(run, vector) -> None:
    few = ("--control-vector-layer-range", "6", "9")
    for flags, words in (
        (("--control-vector", vector, *few), "no direction for them (it has: 1 to 5)"),
        (few, "goes with --control-vector"),
        (("--control-vector", PIRATE), "adapter of another kind (use --lora)"),
        (("--control-vector", "missing.gguf"), "missing.gguf: no such file"),
    ):
        outcome = run("run", DEMO, QUESTION, *flags, *GREEDY)
        assert (outcome.code, outcome.err.count("\n")) == (1, 1) and words in outcome.err, outcome.err


def test_lora_commands_with_a_control_vector(run, vector, tmp_path) -> None:
    shown = run("lora", "info", DEMO, vector)
    assert "control vector, 960 parameters" in shown.out and "after 5 layers: 1-5" in shown.out
    assert json.loads(run("lora", "info", DEMO, vector, "--json").out)["layers"] == [1, 2, 3, 4, 5]
    target = str(tmp_path / "out.gguf")
    for command, words in (
        (("convert", DEMO, vector, target), "is a GGUF file already"),
        (("merge", DEMO, target, "--lora", vector), "changes no weights"),
    ):
        outcome = run("lora", *command)
        assert outcome.code == 1 and words in outcome.err and not Path(target).exists()


def test_a_vector_is_made_of_two_files_of_texts(run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("My dog is very\nOnce upon a time\n")
    (tmp_path / "b.txt").write_text("A cat was\nIt is\n")
    files = [str(tmp_path / name) for name in ("v.gguf", "a.txt", "b.txt")]
    result = run("lora", "vector", DEMO, *files, "--layers", "2", "4", "--backend", "native")
    assert (result.code, result.err) == (0, f"{files[0]}: directions after 3 layers: 2-4\n")
    assert "adds directions after 3 layers: 2-4" in run("lora", "info", DEMO, files[0]).out
    with slm.load(DEMO, backend="native") as model:
        expected = model.control_vector(*(Path(file).read_text().splitlines() for file in files[1:]), layers=[4])
    with GgufFile.open(Path(files[0])) as file:
        assert file.tensor_data("direction.4").view(np.float32) == pytest.approx(expected[4], abs=1e-5)
    again = run("lora", "vector", DEMO, *files, "--backend", "native")
    assert (again.code, again.err) == (1, f"error: {files[0]}: there is a file already (to replace it: --force)\n")
    unknown = run("lora", "vector", DEMO, *files, "--force", "--method", "svm", "--backend", "native")
    assert unknown.err == "error: method='svm' (accepted: mean, pca)\n"
