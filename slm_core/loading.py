"""``slm.load``: choose a backend for a file, load it, and put chats and sessions on top."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, overload

from slm_core.chat import Chat, ChatOptions, Session
from slm_core.chat.overflow import Overflow
from slm_core.closing import Closing
from slm_core.embedding import Embeddings, checked_pooling, embed, token_states
from slm_core.engine import Engine, EngineOptions, GenerateOptions, Prompt, generate
from slm_core.errors import InvalidModelFile, InvalidOption, PluginError, TemplateError, UnsupportedModel
from slm_core.formatting import choose, source_of
from slm_core.generation import Answer
from slm_core.generation.scoring import Score, checked_top, score_windows
from slm_core.generation.speculation import DraftModel, TranslatedDraftModel, draft_model
from slm_core.gguf import GgufFile
from slm_core.hub import fetch, is_reference
from slm_core.plugins import Registry, registry
from slm_core.protocols import Backend, Context, Formatter, Model, Vocab
from slm_core.sampling import Sampling
from slm_core.types import (
    BackendStatus,
    Capability,
    ContextOptions,
    KvType,
    Message,
    ModelInfo,
    ModelOptions,
    ModelSource,
    Pooling,
    Progress,
    States,
    Support,
    Tool,
)

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

BACKEND_VARIABLE = "SLM_BACKEND"


class LoadedModel(Closing):
    """A model and all that can be done with it; what ``slm.load`` returns. Shareable between threads.

    Args:
        model: the backend's model.
        formatter: the chat format, or why there is none.
        reason: why this backend was chosen.
        origin: where the chat format comes from; its name where "".
    """

    def __init__(self, model: Model, formatter: Formatter | TemplateError, reason: str, origin: str = "") -> None:
        self._model = model
        self._formatter = formatter
        if not origin:
            origin = f"none: {formatter}" if isinstance(formatter, TemplateError) else formatter.name
        self.info: ModelInfo = replace(model.info, reason=reason, formatter=origin)

    @property
    def model(self) -> Model:
        """The backend's model, as the contract has it."""
        return self._model

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        return self._model.vocab

    @property
    def formatter(self) -> Formatter:
        """The model's chat format.

        Raises:
            TemplateError: the file has none, and none was named.
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
        """An empty KV cache; see ``types.ContextOptions`` for the sizes."""
        types = (None if kind is None else _kv_type(kind) for kind in (kv_type_k, kv_type_v))
        return self._model.new_context(ContextOptions(n_ctx, n_seq_max, n_batch, *types))

    def session(
        self, *, n_ctx: int = 4096, n_seq_max: int = 8, n_batch: int = 512, sampling: Sampling | None = None
    ) -> Session:
        """A session in a context of its own, closed with it; further sessions share the context by ``fork``."""
        context = self.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        return Session(context, self.vocab, sampling=sampling, owns_context=True)

    def chat(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        n_ctx: int = 4096,
        n_seq_max: int = 8,
        n_batch: int = 512,
        sampling: Sampling | None = None,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
        overflow: Overflow = "error",
    ) -> Chat:
        """A conversation in a context of its own, closed with it; see ``Chat``."""
        formatter = self.formatter
        context = self.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        try:
            return Chat(
                Session(context, self.vocab, owns_context=True),
                formatter,
                system=system,
                messages=messages,
                options=ChatOptions(sampling if sampling is not None else Sampling(), tuple(tools), thinking, overflow),
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
        """Answer one prompt, or many: these are computed together, in a context of their own.

        Each answer is the one that its prompt gets alone: a neighbour changes logits within tolerance only.

        Args:
            prompts: a text to continue, a list of tokens, or a list of messages; or a list of such prompts.
            sampling: how tokens are chosen; its seed is each prompt's.
            options: see ``engine.GenerateOptions``.

        Returns:
            An answer for one prompt; for a list of prompts, their answers in order.

        Raises:
            RequestsFailed: some of a list of prompts failed; it carries the answers of the others.
            InvalidOption: a value that does not fit.
            ContextFull, SamplingError, DecodeFailed: what a single prompt failed with.
            ConstraintError: the spec of a constraint is invalid or unsupported.
            TemplateError: messages, and the model has no chat format, or it refuses them.
        """
        return generate(self, prompts, sampling, **options)

    def engine(
        self,
        *,
        n_ctx: int = 32768,
        n_batch: int = 512,
        n_parallel: int = 16,
        step_ms: float = 100,
        aging_s: float = 10,
        prefix_cache: bool = True,
        swap_bytes: int = 1 << 30,
        cache_dir: str | Path | None = None,
        cache_dir_bytes: int = 4 << 30,
        tracer_provider: TracerProvider | None = None,
    ) -> Engine:
        """An engine that answers requests of many threads and tasks, in a context of its own; see ``Engine.submit``.

        Args:
            n_ctx: positions of all requests together, and of the prefixes that are kept for others.
            n_batch: tokens of a step.
            n_parallel: the most requests that are computed together.
            step_ms: milliseconds that a step may take, so that a long prompt does not hold up other answers.
            aging_s: seconds of waiting that count as one step of priority.
            prefix_cache: whether what requests have in common is computed once.
            swap_bytes: memory for dumps of requests that gave up their sequences to others.
            cache_dir: a directory where answered histories are kept, for this engine and later ones; None for none.
            cache_dir_bytes: of all histories there.
            tracer_provider: of OpenTelemetry: each request becomes a span; None for none.

        Raises:
            InvalidOption: a value that does not fit.
            MissingExtra: requests shall be traced, and OpenTelemetry is not installed.
        """
        directory = None if cache_dir is None else Path(cache_dir).expanduser()
        options = EngineOptions(n_parallel, step_ms, aging_s, prefix_cache, swap_bytes, directory, cache_dir_bytes)
        context = self.new_context(n_ctx=n_ctx, n_seq_max=2 * n_parallel, n_batch=n_batch)
        try:
            return Engine(
                context,
                self.vocab,
                lambda: self.formatter,
                options,
                model_name=self.info.name or self.info.path.stem,
                tracer_provider=tracer_provider,
            )
        except BaseException:
            context.close()
            raise

    def drafter(
        self, target: LoadedModel, *, n_ctx: int = 4096, n_batch: int = 512, sampling: Sampling | None = None
    ) -> DraftModel | TranslatedDraftModel:
        """What drafts with this, smaller, model for answers of ``target``; see ``speculation.draft_model``.

        It has a context of its own, closed with it.

        Args:
            target: the model that answers.
            n_ctx: the longest history that it drafts for.
            n_batch: tokens of a history that it reads at a time.
            sampling: to draw drafts with; None for the likeliest tokens.

        Raises:
            InvalidOption: see ``speculation.draft_model``.
        """
        context = self.new_context(n_ctx=n_ctx, n_batch=n_batch)
        try:
            return draft_model(context, self.vocab, target.vocab, sampling=sampling)
        except BaseException:
            context.close()
            raise

    def score(self, text: str, *, n_ctx: int = 4096, n_batch: int = 512, top: int = 0) -> Score:
        """How likely the model finds a text; see ``Session.score`` for a text that continues another.

        Of a text longer than ``n_ctx``, each token is scored with at least the ``n_ctx // 2`` tokens before it.

        Args:
            text: the text; control tokens in it are not parsed.
            n_ctx: the longest history that a token is scored with.
            n_batch: tokens that are decoded at once.
            top: how many of the likeliest tokens are told in the place of each; see ``Score.top``.
        """
        wanted, ids = checked_top(top), self.vocab.encode(text, add_special=True, parse_special=False)
        with self.new_context(n_ctx=n_ctx, n_batch=min(n_batch, n_ctx)) as context:
            return score_windows(context, ids, top=wanted)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling | str | None = None,
        normalize: bool = True,
        n_batch: int = 512,
    ) -> Embeddings:
        """Embed one text, or several.

        Args:
            texts: the texts; control tokens in them are not parsed.
            pooling: how tokens' hidden states become one vector: "last", "mean", "max" or "cls"; None for what the
                file says, else for the mean of an encoder and the last token of any other model.
            normalize: divide vectors by their length, so that their products are cosines.
            n_batch: tokens that are run at once; an encoder's batches are as large as its longest text needs.

        Raises:
            UnsupportedOutput: the backend gives no hidden states of this model.
            InvalidOption: an unknown pooling, or a text without tokens.
        """
        ids = self._encoded([texts] if isinstance(texts, str) else texts)
        with self._context_for(ids, n_batch) as context:
            return embed(context, ids, checked_pooling(pooling) or self.info.pooling, normalize=normalize)

    def hidden_states(self, text: str, *, n_batch: int = 512) -> States:
        """The hidden states of a text's tokens behind the model's last norm, float32 [T, E]; see ``embed``."""
        ids = self._encoded([text])
        with self._context_for(ids, n_batch) as context:
            (states,) = token_states(context, ids)
            return states

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.vocab.encode(text, add_special=True, parse_special=False) for text in texts]

    def _context_for(self, texts: Sequence[Sequence[int]], n_batch: int) -> Context:
        """A context in which each text has room."""
        longest = max(map(len, texts), default=1)
        n_ctx, n_seq_max = max(longest, n_batch), min(8, max(1, len(texts)))
        context = self.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        if Capability.ENCODER not in context.capabilities or longest <= n_batch:
            return context
        context.close()
        return self.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=longest)

    def close(self) -> None:
        """Free the weights now. Twice is fine; contexts of this model are closed first."""
        self._model.close()


def load(
    path: str | os.PathLike[str] | bytes,
    *,
    backend: str | None = None,
    device: str = "auto",
    n_threads: int | None = None,
    progress: Progress | None = None,
    formatter: str | Formatter | None = None,
    chat_template: str | None = None,
    **backend_options: object,
) -> LoadedModel:
    """Load a model file, or a directory of a model.

    Args:
        path: the file; of a sharded model, any shard; or a directory; or a model of the Hugging Face Hub, as in
            "hf://user/repo:Q4_K_M". Bytes are the content of a GGUF file, not its name.
        backend: by name; else the one that ``SLM_BACKEND`` names; else the best that supports file and device.
        device: "auto", "cpu", "cuda", ...; a device that is missing is an error.
        n_threads: CPU threads; None for one per physical core that this process may use.
        progress: called with the share that is done, 0.0 to 1.0.
        formatter: a chat format, or the name of one ("chatml"), or of one of the model's further templates
            ("tool_use"); else the model's own template, or what its control tokens look like, as ``info`` tells.
        chat_template: text of a jinja template in place of the model's own.
        backend_options: what the backend's ``load_options`` lists.

    Raises:
        InvalidModelFile, UnsupportedModel: the file is damaged, or nothing here can run it.
        UnknownBackend, BackendUnavailable: the backend is not there, or not able.
        UnknownOption, InvalidOption: an option that the backend does not have, or a value that does not fit.
        TemplateError: the template, or the format that was named, is not there or not valid.
    """
    if formatter is not None and chat_template is not None:
        raise InvalidOption("give a chat_template or a formatter, not both")
    source = path if isinstance(path, bytes) else local(path)
    known = registry()
    engine, reason = _choose(known, source, backend, device)
    options = ModelOptions(device, n_threads, progress, backend_options)
    model = engine.load(source, options)
    try:
        chat_format, origin = _formatter(known, model, formatter, chat_template)
        return LoadedModel(model, chat_format, reason, origin)
    except BaseException:
        model.close()
        raise


def backends() -> list[BackendStatus]:
    """What is installed, what is not, and how to get it. Never raises."""
    return registry().statuses()


def support_of(engine: Backend, source: ModelSource, device: str = "auto") -> Support:
    """Say whether a backend can run a file, or a directory, which is no damaged file to those that read none.

    Raises:
        InvalidModelFile: the file is missing or damaged.
    """
    try:
        return engine.supports(source, device)
    except InvalidModelFile as error:
        if isinstance(source, bytes) or not source.is_dir():
            raise
        return Support(False, str(error))


def load_vocab(path: str | os.PathLike[str] | bytes) -> Vocab:
    """The vocabulary of a model file alone, also of one that holds nothing else, or of a model's directory.

    Args:
        path: as for ``load``.

    Raises:
        InvalidModelFile, UnsupportedModel: the file is damaged, or its vocabulary is of an unknown kind.
    """
    from slm_core.tokenization import build_vocab, directory_vocab

    source = path if isinstance(path, bytes) else local(path)
    if isinstance(source, Path) and source.is_dir():
        return directory_vocab(source)
    with GgufFile.open(source) as file:
        return build_vocab(file)


def local(path: str | os.PathLike[str]) -> Path:
    """Where a model is on this machine: a reference of the Hub (``hf://user/repo:Q4_K_M``) is fetched, see ``hub``.

    Raises:
        InvalidModelFile, UnsupportedModel: it cannot be had.
    """
    if is_reference(os.fspath(path)):
        return fetch(os.fspath(path))
    return Path(path).expanduser()


def demo_model_path() -> Path:
    """The small chat model that ships with the package."""
    return Path(str(importlib.resources.files("slm_core") / "data" / "demo.gguf"))


def _kv_type(name: KvType | str) -> KvType:
    try:
        return KvType(name)
    except ValueError as error:
        raise InvalidOption(f"unknown KV type {name!r} (accepted: {', '.join(KvType)})") from error


def _choose(known: Registry, source: ModelSource, name: str | None, device: str) -> tuple[Backend, str]:
    """The backend to use, and why."""
    chosen = name or os.environ.get(BACKEND_VARIABLE)
    if chosen:
        return known.backend(chosen), "named by the caller" if name else f"named by {BACKEND_VARIABLE}"
    able: list[tuple[int, str, Backend]] = []
    refusals = []
    for candidate in known.backends:
        try:
            engine = known.backend(candidate)
        except PluginError as error:  # somebody's broken plugin must not keep the others from running
            refusals.append(f"{candidate}: {error}")
            continue
        support = support_of(engine, source, device)
        if support.supported:
            able.append((support.rank, candidate, engine))
        else:
            refusals.append(f"{candidate}: {support.reason}")
    if not able:
        why = "; ".join(refusals) or "none is registered"
        what = f"these {len(source)} bytes" if isinstance(source, bytes) else source
        raise UnsupportedModel(f"no backend can run {what} on device {device!r} ({why})")
    rank, best, engine = max(able, key=lambda ranked: ranked[0])
    others = ", ".join(f"{other} {r}" for r, other, _ in able if other != best)
    why = f"ranked {rank} for this file and device" + (f" (others: {others})" if others else ", the only one that can")
    return engine, "; ".join([why, *refusals])


def _formatter(
    known: Registry, model: Model, wanted: str | Formatter | None, template: str | None
) -> tuple[Formatter | TemplateError, str]:
    """The chat format to use and its origin; an error where the model has none, to be raised when one is needed."""
    if wanted is not None and not isinstance(wanted, str):
        return wanted, wanted.name
    source, has_token = source_of(model)
    try:
        return choose(known, source, has_token, name=wanted, template=template)
    except TemplateError as error:
        if wanted is not None or template is not None:
            raise
        return error, f"none: {error}"
