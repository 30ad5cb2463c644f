"""Directories with a block for multi-token prediction (MTP), as DeepSeek and GLM 4.5 have it, and their GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from native.architectures.cases import CASES
from native.architectures.checkpoints import change_config, change_tensors, save_directory
from native.architectures.conversion import converted_tensors, randomize
from native.architectures.exported import export, with_vocabulary
from slm_conformance.oracle.factories import n_vocab
from slm_conformance.oracle.families import family_of, write_family
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core.checkpoints import open_model
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend

N_LAYERS = 3
NAMES = {  # in the directory, and in GGUF files
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "embed_tokens": "embed_tokens",
}
TOKENS = np.random.default_rng(3).integers(0, 250, 60).tolist()
_N = 4


@pytest.fixture(scope="module", params=["deepseek3", "glm4moe"])
def family(request: pytest.FixtureRequest) -> str:
    """A family whose files may have an MTP layer; with one, it is called ``<family>_mtp``."""
    return str(request.param)


@pytest.fixture(scope="module")
def extra(family: str) -> dict[str, torch.Tensor]:
    """The tensors of the MTP block outside its transformer block. Output and embedding are not the model's."""
    metadata = family_of(f"{family}_mtp").metadata
    n_embd, rng = int(str(metadata["embedding_length"])), np.random.default_rng(7)
    size = n_vocab()
    shapes = {
        "eh_proj": (n_embd, 2 * n_embd),
        "shared_head.head": (size, n_embd),
        "embed_tokens": (size, n_embd),
    }
    scales = {
        "eh_proj": (2 * n_embd) ** -0.5,
        "shared_head.head": 2.5 * n_embd**-0.5,
        "embed_tokens": 2.5 * n_embd**-0.5,
    }
    tensors = {name: scales[name] * rng.standard_normal(shape) for name, shape in shapes.items()}
    tensors |= {name: 1 + 0.2 * rng.standard_normal(n_embd) for name in NAMES if name.endswith("norm")}
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in tensors.items()}


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    """A transformers model with one layer more: its last layer is the transformer block of the MTP block."""
    case = CASES[family]
    assert not isinstance(case, str)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_with_mtp = case.make(f"{family}_mtp")
    randomize(model_with_mtp, seed=1)
    case.prepare(model_with_mtp, family_of(f"{family}_mtp"))
    return model_with_mtp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Any, extra: dict[str, torch.Tensor]) -> Path:
    folder = save_directory(model, tmp_path_factory.mktemp("mtp"))
    change_config(folder, lambda config: {**config, "num_hidden_layers": N_LAYERS, "num_nextn_predict_layers": 1})
    named = {f"model.layers.{N_LAYERS}.{name}.weight": tensor for name, tensor in extra.items()}
    change_tensors(folder, lambda tensors: {**tensors, **named})
    return folder


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, family: str, model: Any, extra: dict[str, torch.Tensor]
) -> NDArray[np.float32]:
    """Rows of logits and drafts of the GGUF file that the tests convert themselves."""
    case, about = CASES[family], family_of(f"{family}_mtp")
    assert not isinstance(case, str)
    tensors = converted_tensors(model, about.architecture, N_LAYERS + 1, about.metadata, case.changes)
    tensors |= case.extra(model)
    tensors |= {f"blk.{N_LAYERS}.nextn.{NAMES[name]}.weight": values.numpy() for name, values in extra.items()}
    stored = {name: StoredTensor.pack(np.asarray(values), "f32") for name, values in tensors.items()}
    return rows(write_family(tmp_path_factory.mktemp("gguf") / "expected.gguf", f"{family}_mtp", stored))


def rows(path: Path, tokens: Sequence[int] = TOKENS) -> NDArray[np.float32]:
    """The last row of logits, and the rows of a draft after it [1 + n, V]."""
    with NativeBackend().load(path, ModelOptions(backend_options={"tier": "reference"})) as model:
        context = model.new_context(ContextOptions(128, 1, 64, KvType.F32, KvType.F32))
        assert Capability.MTP in context.capabilities
        batch = context.new_batch()
        batch.extend(tokens, Pos(0, 0), logits="last")
        logits = context.decode(batch).copy()
        top = context.draft(0, 11, _N, logits.shape[1])
    drafted = np.empty_like(top.logits)
    np.put_along_axis(drafted, top.tokens, top.logits, axis=1)
    return np.concatenate([logits, drafted])


def test_drafts(folder: Path, expected: NDArray[np.float32]) -> None:
    assert np.array_equal(rows(folder), expected)


def test_the_exported_file(folder: Path, tmp_path: Path) -> None:
    named = with_vocabulary(folder, tmp_path / "named")
    path = export(named, tmp_path / "exported.gguf")
    assert np.array_equal(rows(path), rows(folder))
    llama_mtp = pytest.importorskip("llama_mtp", reason="the oracle is llama.cpp: pip install llama-cpp-python")
    with llama_mtp.LlamaMtp(path) as oracle:
        oracle.decode(TOKENS)
        theirs = oracle.draft(11, _N)
    ours = rows(path)[1:]
    errors = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert errors.max() <= 1e-4, "clause 9"


def test_shared_tensors_may_be_missing(folder: Path, tmp_path: Path) -> None:
    """Without an output matrix and embeddings of its own, the block uses the model's."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_tensors(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if not _is_shared(n)})
    with open_model(tmp_path) as gguf:
        names = {name for name in gguf.tensors if "nextn" in name}
    assert names == {
        f"blk.{N_LAYERS}.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    }
    assert not np.array_equal(rows(tmp_path)[1:], rows(folder)[1:])


def test_without_the_block(family: str, folder: Path, tmp_path: Path) -> None:
    """transformers saves no MTP block, though the configuration counts it: then the file says that there is none."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_tensors(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if f"layers.{N_LAYERS}." not in n})
    with open_model(tmp_path) as gguf:
        architecture = family_of(family).architecture
        assert gguf.require(f"{architecture}.block_count", int) == N_LAYERS
        assert f"{architecture}.nextn_predict_layers" not in gguf.metadata
    with NativeBackend().load(tmp_path, ModelOptions(backend_options={"tier": "reference"})) as model:
        assert Capability.MTP not in model.new_context(ContextOptions(32, 1, 32)).capabilities


def _is_shared(name: str) -> bool:
    return f"layers.{N_LAYERS}." in name and name.endswith(("shared_head.head.weight", "embed_tokens.weight"))
