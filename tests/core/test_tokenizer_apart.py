"""Models without a vocabulary, and models with the vocabulary of another file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import slm_core as slm
from native.architectures.checkpoints import save_directory
from slm_conformance.oracle.factories import make_tiny_model, n_vocab
from slm_core.errors import InvalidModelFile, InvalidOption, TemplateError, VocabError
from slm_core.gguf import GgufFile
from slm_core.gguf.writer import stored
from slm_core.quantizing import model_bytes
from slm_core.types import Pos

BACKENDS = pytest.mark.parametrize(
    ("backend", "options"),
    [("native", {"tier": "reference"}), ("llamacpp", {}), ("onnx", {}), ("native", {"isolated": True})],
    ids=["native", "llamacpp", "onnx", "isolated"],
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3").write(tmp_path_factory.mktemp("model") / "whole.gguf")


@pytest.fixture(scope="module")
def bare(path: Path) -> Path:
    """The model without its vocabulary."""
    with GgufFile.open(path) as file:
        keys = [key for key in file.metadata if not key.startswith("tokenizer.")]
        metadata = {key: file.metadata.stored(key) for key in keys}
        arrays = {
            name: file.tensor_data(name).view(np.float32).reshape(info.shape) for name, info in file.tensors.items()
        }
    metadata["tokenizer.ggml.model"] = stored("none")
    metadata["qwen3.vocab_size"] = stored(arrays["token_embd.weight"].shape[0])
    target = path.parent / "bare.gguf"
    target.write_bytes(model_bytes(metadata, arrays))
    return target


def logits(model: slm.Model) -> np.ndarray:
    with model.new_context(n_ctx=32) as context:
        batch = context.new_batch()
        batch.extend(range(10), Pos(0, 0), logits="all")
        return context.decode(batch).copy()


@BACKENDS
def test_a_model_without_a_vocabulary_computes_tokens(path: Path, bare: Path, backend: str, options: dict) -> None:
    with slm.load(path, backend=backend, **options) as whole, slm.load(bare, backend=backend, **options) as model:
        np.testing.assert_array_equal(logits(model), logits(whole))
        vocab = model.vocab
        assert (vocab.size, vocab.bos, vocab.eos, vocab.eog_ids) == (whole.vocab.size, None, None, frozenset())
        for call in (
            lambda: vocab.encode("a", add_special=False, parse_special=False),
            lambda: vocab.decode([1]),
            lambda: vocab.token_bytes(1),
            lambda: model.session(n_ctx=32).append("a"),
        ):
            with pytest.raises(VocabError, match="tokenizer="):
                call()
        with pytest.raises(TemplateError):
            model.chat()


@BACKENDS
def test_a_vocabulary_apart(path: Path, bare: Path, backend: str, options: dict) -> None:
    with slm.load(path, backend=backend, **options) as whole:
        expected = whole.session(n_ctx=64, sampling=slm.Sampling(temperature=0, max_tokens=5))
        expected.append("hello you")
        answer = expected.generate().run()
        for tokenizer in (path, str(path), whole.vocab):
            with slm.load(bare, backend=backend, tokenizer=tokenizer, formatter="chatml", **options) as model:
                session = model.session(n_ctx=64, sampling=slm.Sampling(temperature=0, max_tokens=5))
                session.append("hello you")
                assert session.tokens == expected.tokens[: session.n_tokens]
                assert session.generate().run().text == answer.text
                model.chat(n_ctx=64)


def test_a_directory_without_a_vocabulary(tmp_path: Path, path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=n_vocab()
    )
    folder = save_directory(LlamaForCausalLM(config), tmp_path / "whole")
    whole = slm.load(folder, backend="native")
    elsewhere = tmp_path / "vocabulary"
    elsewhere.mkdir()
    shutil.move(folder / "tokenizer.json", elsewhere)
    with pytest.raises(VocabError), slm.load(folder, backend="native") as model:
        assert model.vocab.size == whole.vocab.size
        model.vocab.encode("a", add_special=False, parse_special=False)
    for tokenizer in (elsewhere, elsewhere / "tokenizer.json"):
        with slm.load(folder, backend="native", tokenizer=tokenizer) as model:
            text = "\u4e00\u4e05\u4e03"
            ids = model.vocab.encode(text, add_special=False, parse_special=False)
            assert ids == whole.vocab.encode(text, add_special=False, parse_special=False)
            assert len(ids) == 3
    whole.close()


def test_vocabularies_that_do_not_fit_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="tokens"):
        slm.load(path, backend="native", tokenizer=slm.demo_model_path())
    for tokenizer in (5, b"tokenizer"):
        with pytest.raises(InvalidOption, match="a path, or a vocabulary"):
            slm.load(path, backend="native", tokenizer=tokenizer)
    with pytest.raises(InvalidModelFile, match=r"no tokenizer\.json"):
        slm.load(path, backend="native", tokenizer=tmp_path)
    with pytest.raises(InvalidModelFile):
        slm.load(path, backend="native", tokenizer=tmp_path / "missing.gguf")
