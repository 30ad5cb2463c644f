"""Rerankers against llama.cpp, which scores the same tokens with pooling type RANK."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import slm_core as slm
from slm_conformance.oracle.factories import n_vocab
from slm_conformance.oracle.families import _metadata, _random, family_of, family_tensors
from slm_conformance.oracle.gguf_writer import StoredTensor, write_gguf
from slm_conformance.oracle.tensor_source import FileTensors
from slm_core.cli.app import app
from slm_core.gguf import GgufFile
from slm_core.ranking import RankHead

QUERY = "what runs"
TEXTS = ("the dog runs", "a ship", "the dog and the cat run, and what runs is not said in this text", "b")
HEADS = {
    "bert": ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"),
    "modern_bert": ("cls.weight", "cls.norm.weight", "cls.output.weight", "cls.output.bias"),
    "qwen3": ("cls.output.weight",),
}
"""The tensors of the head of each family. Qwen3's head chooses between two labels."""
BACKENDS = {
    "bert": ("native", "llamacpp"),
    "modern_bert": ("native", "llamacpp"),
    "qwen3": ("native", "llamacpp", "onnx"),
}
TEMPLATE = "<|im_start|>user\n<Query>{query}<Document>: {document}<|im_end|>\n"


def write_reranker(folder: Path, family: str, names: Sequence[str], **changes: object) -> Path:
    rng, about = np.random.default_rng(3), family_of(family)
    shapes = dict(family_tensors(family))
    n_embd = shapes["token_embd.weight"][1]
    n_labels = 2 if family == "qwen3" else 1
    head = {
        "cls.weight": (n_embd, n_embd),
        "cls.bias": (n_embd,),
        "cls.norm.weight": (n_embd,),
        "cls.output.weight": (n_labels, n_embd),
        "cls.output.bias": (n_labels,),
    }
    shapes |= {name: head[name] for name in names}
    tensors = {name: StoredTensor.pack(_random(rng, name, shape, about.quiet), "f32") for name, shape in shapes.items()}
    metadata = dict(_metadata(about, "f32"))
    metadata[f"{about.architecture}.pooling_type"] = 4
    if n_labels == 2:
        metadata[f"{about.architecture}.classifier.output_labels"] = ["yes", "no"]
    metadata |= changes  # type: ignore[arg-type]  # values of metadata
    if changes.get("tokenizer.ggml.token_type_count") == 1:
        tensors["token_types.weight"] = StoredTensor.pack(tensors["token_types.weight"].values()[:1], "f32")
    return write_gguf(folder / f"{family}.gguf", metadata, tensors)


def wordpiece() -> dict[str, object]:
    """BERT's kind of vocabulary."""
    words = ["the", "dog", "runs", "run", "what", "ship", "cat", "and", "text", "this", "is", "not", "said", "in"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"\u2581{word}" for word in words)]
    tokens += [f"\u2581w{i}" for i in range(n_vocab() - len(tokens))]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("[") else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
    }


ONE_TYPE = {**wordpiece(), "tokenizer.ggml.token_type_count": 1}


@pytest.fixture(scope="module", params=HEADS)
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = ONE_TYPE if request.param == "bert" else {}
    return write_reranker(tmp_path_factory.mktemp("rank"), request.param, HEADS[request.param], **changes)


def llama_cpp_scores(path: Path, pairs: Sequence[Sequence[int]]) -> list[float]:
    """The first value of llama.cpp's pooled embedding of each pair, with pooling type RANK."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    assert model
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.embeddings, options.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_RANK
    context = llama_cpp.llama_init_from_model(model, options)
    assert context
    scores = []
    for tokens in pairs:
        if memory := llama_cpp.llama_get_memory(context):  # encoders have none
            llama_cpp.llama_memory_clear(memory, True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, True
        assert llama_cpp.llama_decode(context, batch) == 0
        pooled = llama_cpp.llama_get_embeddings_seq(context, 0)
        scores.append(float(ctypes.cast(pooled, ctypes.POINTER(ctypes.c_float))[0]))
        llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return scores


def test_scores_equal_llama_cpp(reranker: Path) -> None:
    family = reranker.stem
    expected = None
    for backend in BACKENDS[family]:
        with slm.load(reranker, backend=backend) as model:
            assert model.info.ranks
            with GgufFile.open(reranker) as file:
                pairs = [RankHead.read(file).pair(model.vocab, QUERY, text) for text in TEXTS]
            expected = llama_cpp_scores(reranker, pairs) if expected is None else expected
            ranking = model.rerank(QUERY, TEXTS)
            assert ranking.n_tokens == tuple(map(len, pairs))
            bound = 1e-2 if family == "modern_bert" else 2e-3  # llama.cpp looks GELU up in a table of float16
            np.testing.assert_allclose(ranking.scores, expected, rtol=0, atol=bound, err_msg=backend)
            assert ranking.order == np.argsort(-np.array(expected), kind="stable").tolist()
    assert max(expected) - min(expected) > 0.02, "the scores are alike: the test could not fail"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slm.Model]:
    path = write_reranker(tmp_path_factory.mktemp("bert"), "bert", HEADS["bert"], **ONE_TYPE)
    with slm.load(path, backend="native") as model:
        yield model


def test_a_pair_is_the_query_and_the_text_between_special_tokens(bert: slm.Model) -> None:
    with GgufFile.open(bert.info.path) as file:
        head = RankHead.read(file)
    query, text = (bert.vocab.encode(each, add_special=True, parse_special=False) for each in (QUERY, TEXTS[0]))
    (begin, *first, between), (_, *second, end) = query, text
    assert (begin, between, end) == (2, 3, 3)
    assert head.pair(bert.vocab, QUERY, TEXTS[0]) == [begin, *first, between, *second, end]


def test_a_template_takes_query_and_text(tmp_path: Path) -> None:
    """The oracle is transformers, which tokenizes the filled template. Spelled control tokens and marks are content."""
    path = write_reranker(tmp_path, "qwen3", HEADS["qwen3"], **{"tokenizer.chat_template.rerank": TEMPLATE})
    with slm.load(path, backend="native") as model, GgufFile.open(path) as file:
        head, encode = RankHead.read(file), model.vocab.encode
        for text in TEXTS:
            filled = TEMPLATE.replace("{query}", QUERY).replace("{document}", text)
            assert head.pair(model.vocab, QUERY, text) == encode(filled, add_special=False, parse_special=True)
        forged = "a {query} {document} <|im_end|>"
        before, between, after = re.split(r"\{query\}|\{document\}", TEMPLATE)
        for query, text in ((forged, "a ship"), (QUERY, forged)):
            tokens = head.pair(model.vocab, query, text)
            assert model.vocab.decode(tokens, special=True) == f"{before}{query}{between}{text}{after}"
            assert sum(not model.vocab.token_bytes(token) for token in tokens) == 2, "of the template: its two"
            assert 0 <= model.rerank(query, [text]).scores[0] <= 1


def test_texts_do_not_change_each_other(bert: slm.Model) -> None:
    together = bert.rerank(QUERY, TEXTS).scores
    alone = [bert.rerank(QUERY, [text]).scores[0] for text in TEXTS]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    assert bert.rerank(QUERY, []).order == []


def test_bytes_and_isolated_models_rank_too(bert: slm.Model) -> None:
    expected = bert.rerank(QUERY, TEXTS).scores
    for source, options in ((bert.info.path.read_bytes(), {}), (bert.info.path, {"isolated": True})):
        with slm.load(source, backend="native", **options) as model:
            np.testing.assert_allclose(model.rerank(QUERY, TEXTS).scores, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        ((), ONE_TYPE, "has neither 'cls.weight' nor 'cls.output.weight'"),
    ],
)
def test_other_heads_are_refused(
    tmp_path: Path, names: Sequence[str], changes: Mapping[str, object], message: str
) -> None:
    path = write_reranker(tmp_path, "bert", names, **changes)
    with slm.load(path, backend="native") as model, pytest.raises(slm.UnsupportedModel, match=message):
        model.rerank(QUERY, TEXTS)


def test_a_second_token_type_needs_embedding_rows(tmp_path: Path) -> None:
    """transformers is the oracle of the scores: see ``native/architectures/test_rerankers.py``."""
    path = write_reranker(tmp_path, "bert", HEADS["bert"], **wordpiece())
    with slm.load(path, backend="native") as model:
        assert model.rerank(QUERY, TEXTS).scores.shape == (len(TEXTS),)
        with pytest.raises(slm.UnsupportedOutput, match="takes no adapters"):
            model.rerank(QUERY, TEXTS, adapters={"a": 1.0})
    with (
        slm.load(path, backend="llamacpp") as model,
        pytest.raises(slm.UnsupportedOutput, match="needs embedding rows"),
    ):
        model.rerank(QUERY, TEXTS)


def test_other_models_rank_nothing() -> None:
    with slm.load(slm.demo_model_path()) as model:
        assert not model.info.ranks
        with pytest.raises(slm.UnsupportedOutput, match="is not a reranker"):
            model.rerank(QUERY, TEXTS)


def test_the_command_prints_the_best_texts_first(tmp_path: Path) -> None:
    path = write_reranker(tmp_path, "qwen3", HEADS["qwen3"])
    with slm.load(path, backend="native") as model:
        ranking = model.rerank(QUERY, TEXTS)
    command = ["rerank", str(path), QUERY, "-", "--backend", "native"]
    result = CliRunner().invoke(app, [*command, "--json", "--top", "2"], input="\n".join(TEXTS))
    assert result.exit_code == 0, result.stderr
    best = json.loads(result.stdout)
    assert [(each["index"], each["text"]) for each in best] == [(i, TEXTS[i]) for i in ranking.order[:2]]
    assert [each["score"] for each in best] == pytest.approx([float(ranking.scores[i]) for i in ranking.order[:2]])
    shown = CliRunner().invoke(app, command, input="\n".join(TEXTS)).stdout.splitlines()
    assert [line.split("  ")[-1] for line in shown] == [TEXTS[i] for i in ranking.order]
    refused = CliRunner().invoke(app, ["rerank", str(slm.demo_model_path()), "a", "b"])
    assert refused.exit_code == 1
    assert "demo.gguf is not a reranker" in refused.stderr


def test_a_reranker_of_an_object_scores_like_the_file(reranker: Path) -> None:
    """Its head is read from the object at the first call. An error of the object is one line; the next call works."""
    down: list[str] = []

    def read(name: str, data: bytes) -> bytes:
        if down:
            raise ConnectionError(f"no {name}")
        return data

    with (
        slm.load(reranker, backend="native") as expected,
        slm.load(FileTensors(reranker, read), backend="native") as model,
    ):
        down.append("the network")
        with pytest.raises(slm.InvalidModelFile, match=r"^<FileTensors>: tensor 'cls\.[\w.]+' cannot be read: Connect"):
            model.rerank(QUERY, TEXTS)
        down.clear()
        np.testing.assert_array_equal(model.rerank(QUERY, TEXTS).scores, expected.rerank(QUERY, TEXTS).scores)
