"""Ranking texts by a query, with rerankers: models whose head scores a pair of texts.

The head is small: it is computed here, from the hidden states of any context with ``EMBEDDINGS``. Pairs and heads are
as in llama.cpp (``llama_pooling_type`` "rank"), which follows the models' own implementations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.chat.prompt import encode_segments
from slm_core.display import count, signature
from slm_core.embedding import pool, token_states
from slm_core.errors import UnsupportedModel, UnsupportedOutput
from slm_core.gguf import RANK_EOS_TWICE, RANK_POOLING, WeightSource
from slm_core.protocols import Context, Vocab
from slm_core.quant import QuantizedTensor, dequantize, dequantize_rows
from slm_core.types import Capability, Pooling, Pos, Segment, States

Matrix: TypeAlias = NDArray[np.float32]

_TEMPLATE = "tokenizer.chat_template.rerank"
_POOLINGS = {"modern-bert": Pooling.MEAN, "qwen3": Pooling.LAST}
_EOS_TWICE_TOKENIZERS = ("roberta-bpe",)
_NORM_EPS = 1e-5
_EMBEDDING, _N_TYPES = "token_embd.weight", 2


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranking:
    """How well texts answer a query.

    Attributes:
        scores: a score for each text, in the order of the texts, float32 [n]; higher is better.
        n_tokens: the number of tokens of each pair of query and text.
    """

    scores: NDArray[np.float32]
    n_tokens: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """The indices of the texts, best first; with equal scores, the earlier text comes first."""
        indices: list[int] = np.argsort(-self.scores, kind="stable").tolist()
        return indices

    def __repr__(self) -> str:
        return signature(self, count(len(self.scores), "text"), f"best first: {self.order[:8]}")


@dataclass(frozen=True, slots=True, eq=False)
class SecondType:
    """The token type of the second text of a pair (BERT's segment 1).

    Engines add the first type to all tokens and rows, so the tokens of the second text become embedding rows.

    Attributes:
        table: the embedding of each token (V, E).
        shift: the embedding of the second type minus the embedding of the first type [E].
    """

    table: QuantizedTensor
    shift: Matrix

    def rows(self, tokens: Sequence[int]) -> Matrix:
        """The rows in place of tokens, float32 [T, E]."""
        ids = np.array(tokens, np.int32)
        return dequantize_rows(self.table.data, self.table.ggml_type, self.table.shape[1], ids) + self.shift


@dataclass(frozen=True, slots=True, eq=False)
class RankHead:
    """The head of a reranker: it computes a score from the hidden states of a pair of texts.

    Attributes:
        pooling: the pooling of the states.
        dense: a matrix [E, E] and a bias [E], applied first, or None.
        activation: after ``dense``: "tanh" or "gelu".
        norm: the weight of a layer norm after the activation, or None.
        norm_eps: the epsilon of the layer norm.
        output: a matrix [labels, E] and a bias [labels], or None: ``dense`` is the last layer then.
        is_choice: whether the score is the probability of the first label; otherwise it is its logit.
        eos_twice: whether EOS stands twice between the texts, as in RoBERTa.
        template: a text with "{query}" and "{document}", or None.
        second_type: the token type of the second text; None if both texts have the same type.
    """

    pooling: Pooling
    dense: tuple[Matrix, Matrix] | None
    activation: str
    norm: Matrix | None
    norm_eps: float
    output: tuple[Matrix, Matrix] | None
    is_choice: bool
    eos_twice: bool
    template: str | None
    second_type: SecondType | None

    @classmethod
    def read(cls, source: WeightSource) -> RankHead:
        """Read the head of a reranker.

        Raises:
            UnsupportedModel: the file has no head.
        """
        architecture = source.require("general.architecture", str)
        dense, output = (_linear(source, name) for name in ("cls", "cls.output"))
        if dense is None and output is None:
            raise UnsupportedModel(
                f"{source.path}: it ranks texts, but has neither 'cls.weight' nor 'cls.output.weight'"
            )
        is_roberta = source.get("tokenizer.ggml.model", str, "") == "t5"
        is_roberta |= source.get("tokenizer.ggml.pre", str, "") in _EOS_TWICE_TOKENIZERS
        return cls(
            pooling=_pooling(source, architecture),
            dense=dense,
            activation="gelu" if architecture == "modern-bert" else "tanh",
            norm=_values(source, "cls.norm.weight"),
            norm_eps=source.get(f"{architecture}.attention.layer_norm_epsilon", float, _NORM_EPS),
            output=output,
            is_choice=architecture == "qwen3",
            eos_twice=source.get(RANK_EOS_TWICE, bool, is_roberta),
            template=source.get(_TEMPLATE, str, None),
            second_type=_second_type(source),
        )

    def pair(self, vocab: Vocab, query: str, text: str) -> list[int]:
        """The tokens of a pair."""
        first, second = self.texts(vocab, query, text)
        return [*first, *second]

    def texts(self, vocab: Vocab, query: str, text: str) -> tuple[list[int], list[int]]:
        """The tokens of a pair: of the query, and of the text. With a template, the first list has all tokens.

        A filled template is tokenized as a whole, as in training. Control tokens are parsed in the template only.
        """
        if self.template is not None:
            contents = {"{query}": query, "{document}": text}
            pieces = re.split(r"(\{query\}|\{document\})", self.template)
            segments = [Segment(contents.get(each, each), each not in contents) for each in pieces]
            return encode_segments(vocab, segments), []
        first, second = (vocab.encode(each, add_special=True, parse_special=False) for each in (query, text))
        if vocab.bos is not None and second[:1] == [vocab.bos]:
            second = second[1:]
        between = [vocab.eos] if self.eos_twice and vocab.eos is not None else []
        return [*first, *between], second

    def score(self, states: States) -> float:
        """The score of a pair, from the hidden states [T, E] that the pooling needs."""
        x = pool(states, self.pooling)
        if self.dense is not None:
            weight, bias = self.dense
            x = weight @ x + bias
            x = np.tanh(x) if self.activation == "tanh" else _gelu(x)
            if self.norm is not None:
                x = (x - x.mean()) / np.sqrt(x.var() + self.norm_eps) * self.norm
        if self.output is not None:
            weight, bias = self.output
            x = weight @ x + bias
        if self.is_choice:
            x = np.exp(x - x.max())
            x = x / x.sum()
        return float(x[0])


def rank(context: Context, vocab: Vocab, head: RankHead, query: str, texts: Sequence[str]) -> Ranking:
    """Score texts by a query; the context is empty before and after. Raises the errors of ``embedding.embed``.

    Raises:
        UnsupportedOutput: the second text has a token type of its own, and the context takes no embedding rows.
    """
    pairs = [head.texts(vocab, query, text) for text in texts]
    n_tokens = tuple(len(first) + len(second) for first, second in pairs)
    if head.second_type is None:
        tokens = [[*first, *second] for first, second in pairs]
        states = token_states(context, tokens, only_last=head.pooling is Pooling.LAST)
    else:
        states = _typed_states(context, pairs, head.second_type)
    return Ranking(np.array([head.score(each) for each in states], np.float32), n_tokens)


def _typed_states(
    context: Context, pairs: Sequence[tuple[list[int], list[int]]], second_type: SecondType
) -> Iterator[States]:
    """The hidden states of each pair, whose second text has a token type of its own, float32 [T, E]."""
    if Capability.EMBEDDING_INPUT not in context.capabilities:
        raise UnsupportedOutput(
            "the second text of this reranker has token type 1, which needs embedding rows, and this context takes none"
        )
    batch = context.new_batch()
    for first, second in pairs:
        batch.clear()
        batch.extend(first, Pos(0, 0), logits="all")
        if second:
            batch.add_embeddings(second_type.rows(second), Pos(0, len(first)), logits="all")
        try:
            yield context.embed(batch).copy()
        finally:
            context.drop(0)


def _pooling(source: WeightSource, architecture: str) -> Pooling:
    """The pooling before the head: the pooling in the metadata, or the pooling of the architecture."""
    name = source.get(RANK_POOLING, str, _POOLINGS.get(architecture, Pooling.CLS))
    if name not in (Pooling.CLS, Pooling.MEAN, Pooling.LAST):
        raise UnsupportedModel(f"{source.path}: a head after pooling by {name[:40]!r} (accepted: cls, mean, last)")
    return Pooling(name)


def _second_type(source: WeightSource) -> SecondType | None:
    """The second token type of a BERT model; None for RoBERTa models, which have one type."""
    if source.get("tokenizer.ggml.model", str, "bert") != "bert":
        return None
    types = _values(source, "token_types.weight")
    if types is None or len(types) < _N_TYPES:
        return None
    info = source.tensors[_EMBEDDING]
    data = source.tensor_data(_EMBEDDING).copy()  # the source is closed before the head is used
    return SecondType(QuantizedTensor(_EMBEDDING, info.shape, info.ggml_type, data), types[1] - types[0])


def _linear(source: WeightSource, name: str) -> tuple[Matrix, Matrix] | None:
    weight, bias = _values(source, f"{name}.weight"), _values(source, f"{name}.bias")
    if weight is None:
        return None
    weight = weight.reshape(-1, weight.shape[-1])
    return weight, np.zeros(len(weight), np.float32) if bias is None else bias


def _values(source: WeightSource, name: str) -> Matrix | None:
    if name not in source.tensors:
        return None
    info = source.tensors[name]
    values: Matrix = dequantize(source.tensor_data(name), info.ggml_type, info.shape).astype(np.float32)
    return values


def _gelu(x: Matrix) -> Matrix:
    """Exact GELU."""
    return np.array([value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x.tolist()], np.float32)
