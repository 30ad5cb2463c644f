"""A loaded model, with its chats, sessions, engines and embeddings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import (
    check_flag,
    check_function,
    check_text,
    checked_list,
    checked_texts,
    checked_tokens,
    refused,
)
from slm_core.chat import Chat, ChatOptions, Session
from slm_core.chat.messages import MessageLike
from slm_core.chat.overflow import Overflow
from slm_core.chat.toolbox import checked_tools
from slm_core.checkpoints import open_model
from slm_core.closing import Closing
from slm_core.context.checks import check_context_options
from slm_core.embedding import Embeddings, checked_pooling, embed, layer_states, token_states
from slm_core.engine import Engine, EngineOptions, GenerateOptions, Prompt, Reuse, generate
from slm_core.errors import BackendCrashed, InvalidOption, TemplateError, UnsupportedOutput
from slm_core.generation import Answer
from slm_core.generation.scoring import Score, checked_top, score_windows
from slm_core.generation.speculation import DraftModel, TranslatedDraftModel, draft_model
from slm_core.isolation.model import IsolatedModel
from slm_core.keywords import checked_keywords
from slm_core.protocols import Adapters, BackendModel, Context, Formatter, Vocab
from slm_core.ranking import RankHead, Ranking, rank
from slm_core.sampling import Sampling
from slm_core.steering import SteeringMethod, control_vector
from slm_core.types import (
    Capability,
    ContextOptions,
    KvType,
    ModelInfo,
    ModelSource,
    Pooling,
    Progress,
    States,
    Tool,
)
from slm_core.user_paths import option_path

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class Model(Closing):
    """A loaded model, returned by ``slm.load``. Threads can share it.

    Args:
        model: the backend's model.
        formatter: the chat format, or the error that explains why there is none.
        reason: why this backend was chosen.
        origin: the origin of the chat format; "" for its name.
        source: the model's file; None if it is unknown.
        vocab: a vocabulary that replaces the vocabulary of ``model``; None for the vocabulary of ``model``.
        backend_name: the name of the backend; "" if it is unknown.
    """

    def __init__(
        self,
        model: BackendModel,
        formatter: Formatter | TemplateError,
        reason: str,
        origin: str = "",
        source: ModelSource | None = None,
        vocab: Vocab | None = None,
        backend_name: str = "",
    ) -> None:
        self._model = model
        self._vocab = model.vocab if vocab is None else vocab
        self._source = source if model.info.ranks else None
        self._head: RankHead | None = None
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._formatter = formatter
        if not origin:
            origin = f"none: {formatter}" if isinstance(formatter, TemplateError) else formatter.name
        self.info: ModelInfo = replace(model.info, reason=reason, formatter=origin, backend_name=backend_name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.info.summary}>"

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

    @property
    def model(self) -> BackendModel:
        """The backend's model; see ``protocols.BackendModel``."""
        return self._model

    @property
    def crashed(self) -> Future[BackendCrashed] | None:
        """With ``isolated``, gets the error when the model's process ends unexpectedly; None without it."""
        return self._model.crashed if isinstance(self._model, IsolatedModel) else None

    @property
    def adapters(self) -> Adapters:
        """The adapters (LoRA, control vectors) that are loaded, by name; ``adapters.load(path, name)`` loads one."""
        return self._model.adapters

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary, or the vocabulary that ``load`` got as ``tokenizer``."""
        return self._vocab

    @property
    def formatter(self) -> Formatter:
        """The model's chat format.

        Raises:
            TemplateError: the file has no chat format, and ``load`` got no chat format.
        """
        if isinstance(self._formatter, TemplateError):
            raise self._formatter
        return self._formatter

    def new_context(
        self,
        *,
        n_ctx: int = 4096,
        n_seq_max: int = 1,
        n_batch: int = 512,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
    ) -> Context:
        """An empty KV cache; see ``types.ContextOptions`` for the sizes and the KV types ("q8_0")."""
        types = (None if kind is None else _kv_type(kind) for kind in (kv_type_k, kv_type_v))
        return self._model.new_context(ContextOptions(n_ctx, n_seq_max, n_batch, *types))

    @checked_keywords
    def session(
        self,
        *,
        n_ctx: int = 4096,
        n_seq_max: int = 8,
        n_batch: int = 512,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        sampling: Sampling | None = None,
        adapters: Mapping[str, float] | None = None,
        queue_timeout: float | None = None,
    ) -> Session:
        """A session in a new context, which is closed with it; ``fork`` makes more sessions in the same context.

        For the context see ``new_context``, for ``adapters`` and ``queue_timeout`` see ``Session``.
        """
        context = self.new_context(
            n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch, kv_type_k=kv_type_k, kv_type_v=kv_type_v
        )
        try:
            return Session(
                context,
                self.vocab,
                sampling=sampling,
                adapters=adapters,
                owns_context=True,
                queue_timeout=queue_timeout,
                n_ctx_train=self.info.n_ctx_train,
            )
        except BaseException:
            context.close()
            raise

    @checked_keywords
    def chat(
        self,
        *,
        system: str | None = None,
        messages: Sequence[MessageLike] = (),
        n_ctx: int = 4096,
        n_seq_max: int = 8,
        n_batch: int = 512,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        sampling: Sampling | None = None,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
        overflow: Overflow = "error",
        adapters: Mapping[str, float] | None = None,
        queue_timeout: float | None = None,
    ) -> Chat:
        """A conversation in a new context, which is closed with the conversation; see ``Chat``.

        For the context see ``new_context``, for ``adapters`` and ``queue_timeout`` see ``Session``.
        """
        formatter = self.formatter
        context = self.new_context(
            n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch, kv_type_k=kv_type_k, kv_type_v=kv_type_v
        )
        try:
            return Chat(
                Session(
                    context,
                    self.vocab,
                    adapters=adapters,
                    owns_context=True,
                    queue_timeout=queue_timeout,
                    n_ctx_train=self.info.n_ctx_train,
                ),
                formatter,
                system=system,
                messages=messages,
                options=ChatOptions(
                    sampling if sampling is not None else Sampling(), checked_tools(tools), thinking, overflow
                ),
            )
        except BaseException:
            context.close()
            raise

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too: it counts as one prompt
        self, prompts: Prompt, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Answer]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer | list[Answer]:
        """Answer one prompt, or many prompts, which are computed together in a new context.

        Each answer is the same as for its prompt alone: other prompts change logits only within tolerance.

        Args:
            prompts: a text to continue, a list of tokens, a text with a gap (``Infill``), or a list of messages; or a
                list of prompts.
            sampling: how tokens are chosen; all prompts use the same seed; None for the defaults.
            options: see ``engine.GenerateOptions``.

        Returns:
            An answer for one prompt; for a list of prompts, their answers in order.

        Raises:
            RequestsFailed: some prompts of a list failed; the error contains the answers of the others.
            InvalidOption: an invalid value.
            UnknownOption: an unknown keyword.
            ContextFull, SamplingError, DecodeFailed: a single prompt failed.
            ConstraintError: the spec of a constraint is invalid or unsupported.
            TemplateError: the model has no chat format for messages, or the chat format refuses them.
            VocabError: a text with a gap, and the model was not trained to fill it.
        """
        return generate(self, prompts, sampling, **options)

    @checked_keywords
    def engine(
        self,
        *,
        n_ctx: int = 32768,
        n_batch: int = 512,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        n_parallel: int = 16,
        step_ms: float = 100,
        aging_s: float = 10,
        prefix_cache: bool = True,
        reuse: Reuse = "prefix",
        swap_bytes: int = 1 << 30,
        cache_dir: str | Path | None = None,
        cache_dir_bytes: int = 4 << 30,
        tracer_provider: TracerProvider | None = None,
    ) -> Engine:
        """An engine that answers requests of many threads and tasks in a new context; see ``Engine.submit``.

        Args:
            n_ctx: positions of all requests together, including kept prefixes.
            n_batch: the largest number of tokens in a step.
            kv_type_k: storage type of keys; None for the backend's default.
            kv_type_v: storage type of values; None for the backend's default.
            n_parallel: the largest number of requests that are computed together.
            step_ms: milliseconds that a step may take, so that a long prompt does not delay other answers. Prompts get
                at least two thirds of a step, which then may take longer.
            aging_s: seconds of waiting that count as one step of priority.
            prefix_cache: whether common prefixes of requests are computed once.
            reuse: "prefix" uses common prefixes. "cut" also cuts ranges that the prompt lacks, for example reasoning
                that a template drops, and uses the tokens after them. Their keys and values depend on the range, so the
                answer may differ; ``usage.shifted_tokens`` counts these tokens.
            swap_bytes: memory for dumps of preempted requests, in bytes.
            cache_dir: a directory for answered histories, for this engine and later engines; None for no directory.
            cache_dir_bytes: the largest number of bytes of all histories in ``cache_dir``.
            tracer_provider: a tracer provider of OpenTelemetry: each request becomes a span; None for no traces.

        Raises:
            InvalidOption: an invalid value.
            MissingExtra: there is a ``tracer_provider``, but OpenTelemetry is not installed.
        """
        directory = None if cache_dir is None else option_path("cache_dir", cache_dir)
        options = EngineOptions(
            n_parallel=n_parallel,
            step_ms=step_ms,
            aging_s=aging_s,
            prefix_cache=prefix_cache,
            reuse=reuse,
            swap_bytes=swap_bytes,
            cache_dir=directory,
            cache_dir_bytes=cache_dir_bytes,
        )
        context = self.new_context(
            n_ctx=n_ctx, n_seq_max=2 * n_parallel, n_batch=n_batch, kv_type_k=kv_type_k, kv_type_v=kv_type_v
        )
        try:
            engine = Engine(
                context,
                self.vocab,
                lambda: self.formatter,
                options,
                model_name=self.info.name or self.info.path.stem,
                adapters=self.adapters,
                n_ctx_train=self.info.n_ctx_train,
                tracer_provider=tracer_provider,
            )
        except BaseException:
            context.close()
            raise
        self._engines.add(engine)
        return engine

    def drafter(
        self,
        target: Model,
        *,
        n_ctx: int = 4096,
        n_batch: int = 512,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        sampling: Sampling | None = None,
    ) -> DraftModel | TranslatedDraftModel:
        """A drafter that uses this smaller model for answers of ``target``; see ``speculation.draft_model``.

        The drafter has a new context, which is closed with the drafter.

        Args:
            target: the target model.
            n_ctx: the longest history, in tokens, that the drafter drafts for.
            n_batch: the largest number of tokens of a batch.
            kv_type_k: storage type of keys; None for the backend's default.
            kv_type_v: storage type of values; None for the backend's default.
            sampling: options to sample drafts; None for greedy drafts.

        Raises:
            InvalidOption: a target that is not a model; see ``speculation.draft_model``.
        """
        if not isinstance(target, Model):
            raise refused("target", target, "the model that answers")
        context = self.new_context(n_ctx=n_ctx, n_batch=n_batch, kv_type_k=kv_type_k, kv_type_v=kv_type_v)
        try:
            return draft_model(context, self.vocab, target.vocab, sampling=sampling)
        except BaseException:
            context.close()
            raise

    def score(
        self,
        text: str,
        *,
        n_ctx: int = 4096,
        n_batch: int = 512,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        adapters: Mapping[str, float] | None = None,
        top: int = 0,
    ) -> Score:
        """Log probabilities of a text; see ``Session.score`` for a text that continues another.

        In a text longer than ``n_ctx``, each token is scored after at least the ``n_ctx // 2`` tokens before it.

        Args:
            text: the text; control tokens in it are not parsed.
            n_ctx: the longest history of a scored token.
            n_batch: the largest number of tokens of a batch.
            kv_type_k: storage type of keys; None for the backend's default.
            kv_type_v: storage type of values; None for the backend's default.
            adapters: adapters (LoRA) of the model by name, with their scales; None for none.
            top: the number of likeliest tokens to list at each position; see ``Score.top``.

        Raises:
            InvalidOption: an invalid value.
        """
        check_text("text", text)
        check_context_options(ContextOptions(n_ctx, 1, n_batch))
        n_top, ids = checked_top(top), self.vocab.encode(text, add_special=True, parse_special=False)
        with self.new_context(
            n_ctx=n_ctx, n_batch=min(n_batch, n_ctx), kv_type_k=kv_type_k, kv_type_v=kv_type_v
        ) as context:
            _use_adapters(context, adapters)
            return score_windows(context, ids, top=n_top)

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | str | None = None,
        normalize: bool = True,
        n_batch: int = 512,
        adapters: Mapping[str, float] | None = None,
    ) -> Embeddings:
        """Embed one text, or several.

        Args:
            texts: the texts, in which control tokens are not parsed, or their tokens.
            pooling: how hidden states of tokens become one vector: "last", "mean", "max" or "cls"; None for the pooling
                of the file; if the file has none, the mean for encoders and the last token for other models.
            normalize: divide vectors by their length, so that their dot products are cosines.
            n_batch: the largest number of tokens of a batch; an encoder's batches are large enough for its longest
                text.
            adapters: adapters (LoRA) of the model by name, with their scales; None for none.

        Raises:
            UnsupportedOutput: the backend does not support hidden states of this model.
            InvalidOption: an unknown pooling or adapter, a text without tokens, or a value of the wrong type.
        """
        check_flag("normalize", normalize)
        accepted = "a text, or a list of texts or of their tokens"
        ids = self._encoded([texts] if isinstance(texts, str) else checked_list("texts", texts, accepted))
        with self._context_for(ids, n_batch) as context:
            _use_adapters(context, adapters)
            return embed(context, ids, checked_pooling(pooling) or self.info.pooling, normalize=normalize)

    def rerank(
        self, query: str, texts: Sequence[str], *, n_batch: int = 512, adapters: Mapping[str, float] | None = None
    ) -> Ranking:
        """Score texts by how well they answer a query, with a reranker.

        Args:
            query: the query; control tokens in it and in the texts are not parsed.
            texts: the texts.
            n_batch: the largest number of tokens of a batch; an encoder's batches are large enough for its longest
                pair.
            adapters: adapters (LoRA) of the model by name, with their scales; None for none.

        Returns:
            The scores, in the order of the texts; ``order`` has the best one first. They are the head's logits, or
            probabilities where a model chooses between labels (Qwen3-Reranker).

        Raises:
            UnsupportedOutput: the model is no reranker, or the backend does not support hidden states of it.
            UnsupportedModel: the head is missing or unknown.
            InvalidOption: a value of the wrong type.
        """
        check_text("query", query)
        texts = checked_texts("texts", texts)
        head = self._rank_head()
        if adapters and head.second_type is not None:
            raise UnsupportedOutput("a reranker whose second text has token type 1 takes no adapters")
        pairs = [head.pair(self.vocab, query, text) for text in texts]
        with self._context_for(pairs, n_batch) as context:
            _use_adapters(context, adapters)
            return rank(context, self.vocab, head, query, texts)

    def _rank_head(self) -> RankHead:
        """The head of a reranker, read when it is first needed."""
        if not self.info.ranks or self._source is None:
            raise UnsupportedOutput(
                f"{self.info.path.name} is not a reranker: its file does not declare the pooling"
                f" 'rank' (model.embed also compares texts)"
            )
        if self._head is None:
            with open_model(self._source) as file:
                self._head = RankHead.read(file)
        return self._head

    def hidden_states(
        self,
        text: str,
        *,
        layers: Sequence[int] | None = None,
        n_batch: int = 512,
        adapters: Mapping[str, float] | None = None,
    ) -> States:
        """The hidden states of a text's tokens after the model's last norm, float32 [T, E]; see ``embed``.

        Args:
            text: the text, in which control tokens are not parsed.
            layers: return the states after these layers instead, 0 to L - 1, without the last norm: float32
                [len(layers), T, E].
            n_batch: see ``embed``.
            adapters: see ``embed``.

        Raises:
            UnsupportedOutput: the backend does not support hidden states of this model, or of its layers.
            InvalidOption: no layers, or one that the model lacks; an unknown adapter, or a text without tokens.
        """
        ids = self._encoded([text])
        with self._context_for(ids, n_batch) as context:
            _use_adapters(context, adapters)
            (states,) = token_states(context, ids) if layers is None else layer_states(context, ids, layers)
            return states

    def control_vector(
        self,
        positive: Sequence[str],
        negative: Sequence[str],
        *,
        layers: Sequence[int] | None = None,
        method: SteeringMethod = "mean",
        n_batch: int = 512,
        progress: Progress | None = None,
    ) -> dict[int, NDArray[np.float32]]:
        """Make a control vector from negative to positive texts; ``adapters.write_control_vector`` saves it.

        Args:
            positive: texts, in which control tokens are parsed: prompts, or beginnings of answers. Their last tokens
                are compared.
            negative: their opposites: one for each, in the same order.
            layers: the layers to steer, from 1 on; None for all of them.
            method: how differences of pairs become a direction: "mean", or "pca" (principal component).
            n_batch: the largest number of tokens of a batch.
            progress: called with the share of the texts that were read.

        Returns:
            The direction of each layer, float32 [E]. It is as long as the texts differ: begin with a scale of 1.

        Raises:
            UnsupportedOutput: the backend does not support hidden states of this model's layers.
            InvalidOption: no pairs, another number of negative texts, an unknown method or layer, or a value of the
                wrong type.
        """
        numbers = f"1 to {self.info.n_layers - 1}; 0 has no direction"
        chosen = range(1, self.info.n_layers) if layers is None else checked_list("layers", layers, numbers)
        if 0 in chosen:
            raise refused("layers", list(chosen), numbers)
        check_function("progress", progress)
        pairs = [
            [self._parsed(text) for text in checked_texts(name, texts)]
            for name, texts in (("positive", positive), ("negative", negative))
        ]
        with self._context_for([*pairs[0], *pairs[1]], n_batch) as context:
            return control_vector(context, pairs[0], pairs[1], chosen, method, progress)

    def _parsed(self, text: str) -> list[int]:
        return self.vocab.encode(text, add_special=True, parse_special=True)

    def _encoded(self, texts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        return [
            self.vocab.encode(text, add_special=True, parse_special=False)
            if isinstance(text, str)
            else checked_tokens(f"text {i}", text, "a text, or a list of token ids")
            for i, text in enumerate(texts)
        ]

    def _context_for(self, texts: Sequence[Sequence[int]], n_batch: int) -> Context:
        """A context with room for the longest text."""
        check_context_options(ContextOptions(n_batch=n_batch))
        longest = max(map(len, texts), default=1)
        n_ctx, n_seq_max = max(longest, n_batch), min(8, max(1, len(texts)))
        context = self.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        if Capability.ENCODER not in context.capabilities or longest <= n_batch:
            return context
        context.close()
        return self.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=longest)

    def close(self) -> None:
        """Free the weights now, after closing the engines and contexts of this model. A second call does nothing.

        Raises:
            ContextBusy: another thread is inside a call of a context; the model stays open.
        """
        for engine in tuple(self._engines):
            engine.close()
        self._model.close()


def _use_adapters(context: Context, scales: Mapping[str, float] | None) -> None:
    """Give all sequences of an empty context these adapters."""
    if scales:
        for seq_id in range(context.n_seq_max):
            context.set_adapters(seq_id, scales)


def _kv_type(name: KvType | str) -> KvType:
    try:
        return KvType(name)
    except ValueError as error:
        raise InvalidOption(f"unknown KV type {name!r} (accepted: {', '.join(KvType)})") from error
