"""A context whose answers the test scripts, so that a test can check exactly how sessions and chats edit it.

Each KV cell stores its token and a hash of the cells before it at the time of its decode. Logits are a function of all
cells, so any wrong edit changes them. A script can choose the token that follows a text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from slm_core.context import ContextBase
from slm_core.errors import InvalidSnapshot, InvalidToken, TemplateError
from slm_core.protocols import Batch
from slm_core.types import (
    AnswerDelta,
    Capability,
    ContextOptions,
    Delta,
    EditLevel,
    KvType,
    Logits,
    Message,
    Role,
    Segment,
)

CONTROLS = ("<|start|>", "<|end|>", "<think>", "</think>")
START, END = 256, 257
N_VOCAB = 256 + len(CONTROLS)
ALL = frozenset({Capability.SHARED_FORK, Capability.KV_PAYLOAD})

Script = Callable[[bytes], int | None]
"""Maps the bytes of the history, with control tokens as text, to the next token, or to None for a pseudo-random one."""


class ByteVocab:
    """One token per byte, and a few control tokens."""

    size, bos, eos, eog_ids = N_VOCAB, None, END, frozenset({END})

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, CONTROLS)) + ")", text) if parse_special else [text]
        ids: list[int] = []
        for piece in pieces:
            special = parse_special and piece in CONTROLS
            ids += [256 + CONTROLS.index(piece)] if special else piece.encode("utf-8", "surrogatepass")
        return ids

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        if not 0 <= id < N_VOCAB:
            raise InvalidToken(f"token {id}")
        if id < 256:
            return bytes([id])
        return CONTROLS[id - 256].encode() if special else b""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return b"".join(self.token_bytes(i, special=special) for i in ids).decode("utf-8", "replace")


class ScriptedContext(ContextBase):
    """A context in plain Python with scripted logits; see the module's docstring."""

    def __init__(
        self,
        script: Script = lambda data: None,
        *,
        n_ctx: int = 400,
        n_seq_max: int = 4,
        n_batch: int = 16,
        kv_type_k: KvType | None = None,
        kv_type_v: KvType | None = None,
        level: EditLevel = EditLevel.CUT,
        capabilities: frozenset[Capability] = ALL,
        payload_format: str = "1",
    ) -> None:
        super().__init__(
            ContextOptions(n_ctx, n_seq_max, n_batch, kv_type_k, kv_type_v),
            backend="scripted",
            fingerprint="scripted",
            n_vocab=N_VOCAB,
            edit_level=level,
            capabilities=capabilities,
            payload_format=payload_format,
        )
        self.script = script
        self.n_decoded = 0
        self.on_decode: Callable[[], None] = lambda: None
        self.states: list[list[tuple[int, str]]] = [[] for _ in range(n_seq_max)]

    def _engine_decode(self, batch: Batch) -> Logits:
        self.on_decode()
        rows = []
        for token, seq_id, is_output in zip(batch.tokens, batch.seq_ids, batch.logits_mask, strict=True):
            state = self.states[int(seq_id)]
            state.append((int(token), _digest(state)))
            if is_output:
                rows.append(self._row(state))
        self.n_decoded += len(batch)
        return np.array(rows, np.float32).reshape(-1, N_VOCAB)

    def _row(self, state: list[tuple[int, str]]) -> Logits:
        row = np.random.default_rng(int(_digest(state), 16)).standard_normal(N_VOCAB).astype(np.float32)
        vocab = ByteVocab()
        forced = self.script(b"".join(vocab.token_bytes(token, special=True) for token, _ in state))
        if forced is not None:
            row[forced] += 50
        return row

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self.states[dst] = self.states[src][:end]

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        del self.states[seq_id][length:]

    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        del self.states[seq_id][start:end]

    def _engine_drop(self, seq_id: int) -> None:
        self.states[seq_id] = []

    def _engine_export(self, seq_id: int) -> bytes:
        return json.dumps(self.states[seq_id]).encode()

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        if len(json.loads(payload)) != n_tokens:
            raise InvalidSnapshot("wrong number of cells")

    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        self.states[seq_id] = [(token, context) for token, context in json.loads(payload)]

    def _engine_close(self) -> None:
        self.states = []


class TagFormatter:
    """Renders messages as ``<|start|>role:content<|end|>``; supports reasoning, but no tools."""

    name = "tags"
    stops: tuple[str, ...] = ()
    call_format = None

    def reasoning_end(self, *, thinking: bool | None = None) -> str | None:
        return "</think>" if thinking else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        **template_kwargs: object,
    ) -> list[Segment]:
        segments = []
        for message in messages:
            if "REFUSE" in message.content:
                raise TemplateError("refused by the template")
            thought = f"<think>{message.reasoning}</think>" if message.reasoning is not None else ""
            segments += [Segment(f"<|start|>{message.role}:{thought}", True), Segment(message.content, False)]
            segments.append(Segment("<|end|>", True))
        if add_generation_prompt:
            segments.append(Segment("<|start|>assistant:" + ("<think>" if thinking else ""), True))
        return segments

    def parse(self, text: str, *, tools: Sequence[Mapping[str, object]] = ()) -> Message:
        parser = self.stream_parser()
        parser.feed(text)
        return parser.finish()[1]

    def stream_parser(self, *, thinking: bool | None = None, tools: Sequence[Mapping[str, object]] = ()) -> TagParser:
        return TagParser(thinking=thinking)


class TagParser:
    """If thinking is on, everything up to ``</think>`` is reasoning."""

    def __init__(self, *, thinking: bool | None) -> None:
        self._text = "<think>" if thinking else ""

    def feed(self, text: str) -> list[AnswerDelta]:
        self._text += text
        return [] if self._text.startswith("<think>") else [Delta("content", text)]

    def finish(self) -> tuple[list[AnswerDelta], Message]:
        if not self._text.startswith("<think>"):
            return [], Message(Role.ASSISTANT, self._text)
        thought, _, content = self._text.removeprefix("<think>").partition("</think>")
        return [Delta("reasoning", thought), Delta("content", content)], Message(Role.ASSISTANT, content, thought)


def says(*answers: str) -> Script:
    """A script: the n-th assistant turn is the n-th answer (later turns repeat the last answer), then END."""

    def script(data: bytes) -> int | None:
        head, tag, generated = data.rpartition(b"<|start|>assistant:")
        if not tag or b"<|end|>" in generated:
            return None
        answer = answers[min(head.count(b"<|start|>assistant:"), len(answers) - 1)].encode()
        return END if len(generated) >= len(answer) else answer[len(generated)]

    return script


def _digest(state: Sequence[tuple[int, str]]) -> str:
    return hashlib.blake2b(repr(list(state)).encode(), digest_size=8).hexdigest()
