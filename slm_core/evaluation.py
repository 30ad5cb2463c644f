"""Models in EleutherAI's lm-evaluation-harness: ``pip install "slm-core[eval]"``.

The harness (https://github.com/EleutherAI/lm-evaluation-harness) has the tasks, prompts and measures. ``HarnessModel``
answers its requests on any backend.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from slm_core.chat.messages import as_messages
from slm_core.errors import InvalidOption, MissingExtra
from slm_core.model import Model
from slm_core.sampling import Sampling
from slm_core.types import KvType

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise MissingExtra(f'evaluations need pip install "slm-core[eval]" ({error})') from error

_ACCEPTED = {"until", "do_sample", "temperature", "max_gen_toks", "top_p", "top_k", "min_p", "seed"}


class _SessionOptions(TypedDict):
    """Options of ``Model.session`` and of ``Model.generate``."""

    n_batch: int
    kv_type_k: KvType | str | None
    kv_type_v: KvType | str | None
    adapters: Mapping[str, float] | None


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A loaded model for ``lm_eval.simple_evaluate(model=...)``.

    Args:
        model: the model; the caller closes it.
        n_ctx: positions of a prompt with its answer; longer prompts lose their beginning. None for the model's
            context, 4096 at most.
        n_batch: the largest number of tokens in a batch.
        n_parallel: the largest number of answers that are generated together.
        kv_type_k: storage type of keys; None for the backend's default.
        kv_type_v: storage type of values; None for the backend's default.
        adapters: adapters (LoRA) of the model by name, with their scales; None for none.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | None = None,
        n_batch: int = 512,
        n_parallel: int = 8,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        adapters: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._n_ctx = min(model.info.n_ctx_train, 4096) if n_ctx is None else n_ctx
        self._n_parallel = n_parallel
        self._session_options: _SessionOptions = {
            "n_batch": n_batch,
            "kv_type_k": kv_type_k,
            "kv_type_v": kv_type_v,
            "adapters": adapters,
        }

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            InvalidOption: the vocabulary has none.
        """
        vocab = self._model.vocab
        token = next((each for each in (vocab.eos, vocab.bos, *sorted(vocab.eog_ids)) if each is not None), None)
        if token is None:
            raise InvalidOption("the vocabulary has no token that begins or ends a text, so tasks have no beginning")
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored from its beginning on: BOS, if there is one."""
        bos = self._model.vocab.bos
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a prompt with its answer."""
        return self._n_ctx

    @property
    def tokenizer_name(self) -> str:
        """A name of the vocabulary, for caches of requests."""
        return self._model.info.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The chat template, for the report."""
        return (self._model.info.chat_template or self._model.formatter.name) if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, with control tokens as text."""
        segments = self._model.formatter.render(
            as_messages(chat_history),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return "".join(segment.text for segment in segments)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """The tokens of a text. As in transformers, text that spells control tokens becomes these tokens."""
        vocab = self._model.vocab
        ids = vocab.encode(string, add_special=add_special_tokens is not False, parse_special=True)
        if add_special_tokens is None and len(ids) > 1 and ids[0] == ids[1] == vocab.bos:
            del ids[0]  # the prompt spells BOS itself
        return ids

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See ``_loglikelihood_tokens``. Progress is shown in terminals only."""
        in_terminal = sys.stderr.isatty()
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm or not in_terminal)
        return scored

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **others: object
    ) -> list[tuple[float, bool]]:
        """The log probability of each continuation after its context, and whether it is the greedy one."""
        indices_by_context: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        pairs = [_fitted(context, continuation, self._n_ctx) for _, context, continuation in requests]
        for i, pair in enumerate(pairs):
            indices_by_context[tuple(pair[0])].append(i)
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # Sorted, so that neighbours share the longest prefixes; the session keeps them.
        with (
            self._model.session(n_ctx=self._n_ctx, n_seq_max=2, **self._session_options) as session,
            tqdm(total=len(requests), desc="Scoring", disable=disable_tqdm) as bar,
        ):
            for prefix in sorted(indices_by_context):
                session.follow(prefix)
                for i in indices_by_context[prefix]:
                    scored = session.score(pairs[i][1], top=1)
                    is_greedy = all(top[0][0] == token for top, token in zip(scored.top, pairs[i][1], strict=True))
                    results[i] = scored.total, is_greedy
                    bar.update()
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log probability of each whole text, in windows where it is longer than the context."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._n_ctx - 1,
                context_len=1,
            )
            pairs = [(("", ""), *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to one of its stop texts."""
        texts = [""] * len(requests)
        samplings = [_sampling(request.args[1]) for request in requests]
        indices_by_sampling: defaultdict[str, list[int]] = defaultdict(list)
        for i, sampling in enumerate(samplings):
            indices_by_sampling[json.dumps(sampling.to_dict(), sort_keys=True)].append(i)
        for indices in indices_by_sampling.values():
            sampling = samplings[indices[0]]
            n_prompt = max(1, self._n_ctx - (sampling.max_tokens or 0) - 1)
            prompts = [self.tok_encode(requests[i].args[0])[-n_prompt:] for i in indices]
            answers = self._model.generate(
                prompts,
                sampling,
                n_parallel=self._n_parallel,
                progress=False if disable_tqdm else None,
                **self._session_options,
            )
            for i, answer in zip(indices, answers, strict=True):
                texts[i] = answer.text
        return texts


def _fitted(context: Sequence[int], continuation: Sequence[int], n_ctx: int) -> tuple[list[int], list[int]]:
    """A pair whose context loses its beginning if it does not fit.

    Raises:
        InvalidOption: the continuation alone is longer.
    """
    n_context = n_ctx - len(continuation)
    if n_context < 1:
        raise InvalidOption(f"a continuation has {len(continuation)} tokens, and the context {n_ctx} positions")
    return list(context[-n_context:]), list(continuation)


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """The sampling options of a task.

    Raises:
        InvalidOption: an option that is unknown here.
    """
    kwargs = normalize_gen_kwargs(dict(options))
    if unknown := sorted(kwargs.keys() - _ACCEPTED):
        raise InvalidOption(f"the task asks for {', '.join(unknown)} (accepted: {', '.join(sorted(_ACCEPTED))})")
    stops: Iterable[str] = (stop for stop in kwargs["until"] if stop)
    others = {name: kwargs[name] for name in ("top_p", "top_k", "min_p", "seed") if name in kwargs}
    fixed = {"temperature": kwargs.get("temperature", 0.0), "max_tokens": kwargs["max_gen_toks"], "stop": tuple(stops)}
    return Sampling.preset("neutral", **fixed, **others)
