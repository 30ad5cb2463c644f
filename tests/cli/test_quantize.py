"""``slm quantize``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slm_core.gguf import GgufFile
from slm_core.quantizing import quantize_model
from toy_models import Toy, importance_for, write_imatrix


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Toy(n_layers=2, n_cols=160).write(tmp_path / "toy.gguf")


def test_the_command_equals_the_api(run, source, tmp_path) -> None:
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", importance_for(source))
    overrides = ("--override", r"attn_v=Q8_0", "--override", "ffn_(up|gate)=q5_1")
    command = ("quantize", str(source), str(tmp_path / "a.gguf"), "--type", "q4_k_m", "--imatrix", str(imatrix))
    outcome = run(*command, *overrides, "--threads", "2")
    assert outcome.code == 0, outcome.err
    options = {"overrides": {"attn_v": "Q8_0", "ffn_(up|gate)": "Q5_1"}, "imatrix": imatrix}
    quantize_model(source, tmp_path / "b.gguf", "Q4_K_M", **options)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()

    assert "no importance of 2 tensors ('token_embd.weight', 'output.weight')" in outcome.err
    (fallback,) = [line.split() for line in outcome.out.splitlines() if line.startswith("blk.1.attn_q.weight")]
    assert fallback == ["blk.1.attn_q.weight", "160", "Q4_K", "256", "Q5_0"]
    megabytes = (tmp_path / "a.gguf").stat().st_size / 1e6
    assert f"to {megabytes:,.1f} MB" in outcome.out


def test_json_lists_every_tensor(run, source, tmp_path) -> None:
    target = tmp_path / "new.gguf"
    facts = json.loads(run("quantize", str(source), str(target), "--type", "Q6_K", "--json").out)
    with GgufFile.open(target) as file:
        types = {name: (tensor.ggml_type.name, tensor.n_bytes) for name, tensor in file.tensors.items()}
    assert {t["name"]: (t["type"], t["bytes"]) for t in facts["tensors"]} == types
    assert facts["bytes"] == target.stat().st_size
    assert facts["written"] is True
    assert {t["requested_type"] for t in facts["tensors"]} == {"F32", "Q6_K", "Q8_0"}


def test_a_dry_run_writes_nothing(run, source, tmp_path) -> None:
    outcome = run("quantize", str(source), str(tmp_path / "new.gguf"), "--type", "Q4_0", "--pure", "--dry-run")
    assert (outcome.code, "nothing written" in outcome.out) == (0, True)
    assert not (tmp_path / "new.gguf").exists()
    size = json.loads(run("quantize", str(source), "x", "--type", "Q4_0", "--pure", "--dry-run", "--json").out)["bytes"]
    quantize_model(source, tmp_path / "new.gguf", "Q4_0", pure=True)
    assert (tmp_path / "new.gguf").stat().st_size == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--type", "Q4_K_XL"], "unknown type 'Q4_K_XL' (accepted: F32,"),
        (["--type", "Q8_0", "--override", "attn_v"], "--override 'attn_v' (accepted: REGEX=TYPE)"),
        (["--type", "Q8_0", "--override", "=Q8_0"], "--override '=Q8_0' (accepted: REGEX=TYPE)"),
        (["--type", "Q8_0", "--override", "v=F16", "--override", "v=F32"], "--override 'v' is given twice"),
        (["--type", "Q8_0", "--override", "(=F16"], "'(' is not a regular expression"),
        (["--type", "Q8_0", "--override", "conv=F16"], "'conv' matches no name"),
        (["--type", "Q8_0", "--imatrix", "missing.dat"], "missing.dat: no such file"),
    ],
)
def test_errors_of_options_are_one_line(run, source, tmp_path, arguments, message) -> None:
    outcome = run("quantize", str(source), str(tmp_path / "new.gguf"), *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "new.gguf").exists()


def test_files_are_not_overwritten_without_a_flag(run, source, tmp_path) -> None:
    (tmp_path / "new.gguf").write_bytes(b"precious")
    command = ("quantize", str(source), str(tmp_path / "new.gguf"), "--type", "Q8_0")
    outcome = run(*command)
    assert (outcome.code, "there is a file already" in outcome.err) == (1, True)
    assert run("quantize", str(source), str(source), "--type", "Q8_0", "--force").code == 1
    assert run(*command, "--force").code == 0
    assert run("quantize", str(source), str(tmp_path / "none" / "x.gguf"), "--type", "Q8_0").code == 1
    assert run("quantize", str(tmp_path / "missing.gguf"), "x", "--type", "Q8_0").code == 1
    assert run("quantize", str(source), "x").code == 2
