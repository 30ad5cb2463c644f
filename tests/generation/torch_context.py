"""A context with the logits of a small torch model, for comparisons with ``generate`` of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_core.context import ContextBase
from slm_core.errors import DecodeFailed
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits

N_VOCAB = 37


def make_model(seed: int = 0) -> Any:
    """A Llama with large random weights, so that tokens have clearly different probabilities."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=N_VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


class LetterVocab:
    """Token i is the i-th character from "0" on, or two letters if i is a multiple of seven."""

    size, bos, eos = N_VOCAB, None, None

    def __init__(self, eog_ids: Sequence[int] = ()) -> None:
        self.eog_ids = frozenset(eog_ids)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [(ord(letter) - ord("0")) % N_VOCAB for letter in text.lstrip(" ")]

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        return b"" if id in self.eog_ids else chr(ord("0") + id).encode()

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode()


class TorchContext(ContextBase):
    """Computes every row from the whole history; a decode can be made to fail."""

    def __init__(
        self,
        model: Any,
        *,
        n_ctx: int = 2000,
        n_seq_max: int = 16,
        n_batch: int = 64,
        level: EditLevel = EditLevel.CUT,
        capabilities: frozenset[Capability] = frozenset({Capability.SHARED_FORK}),
    ) -> None:
        super().__init__(
            ContextOptions(n_ctx, n_seq_max, n_batch),
            backend="torch-toy",
            fingerprint="torch-toy",
            n_vocab=N_VOCAB,
            edit_level=level,
            capabilities=capabilities,
            payload_format="1",
        )
        self.model = model
        self.held: list[list[int]] = [[] for _ in range(n_seq_max)]
        self.batches: list[int] = []
        self.fails_at: int | None = None

    def _engine_decode(self, batch: Batch) -> Logits:
        import torch

        if self.fails_at == len(self.batches):
            self.fails_at = None
            raise DecodeFailed("as the test wants it")
        outputs: dict[int, list[tuple[int, list[int]]]] = {}  # by length: the index of a row and its history
        n_rows = 0
        for token, seq_id, is_output in zip(batch.tokens.tolist(), batch.seq_ids, batch.logits_mask, strict=True):
            self.held[seq_id].append(token)
            if is_output:
                outputs.setdefault(len(self.held[seq_id]), []).append((n_rows, list(self.held[seq_id])))
                n_rows += 1
        rows = np.empty((n_rows, N_VOCAB), np.float32)
        for alike in outputs.values():
            with torch.no_grad():
                rows[[row for row, _ in alike]] = self.model(torch.tensor([tokens for _, tokens in alike])).logits[
                    :, -1
                ]
        self.batches.append(len(batch))
        return rows

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self.held[dst] = self.held[src][:end]

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        del self.held[seq_id][length:]

    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        del self.held[seq_id][start:end]

    def _engine_drop(self, seq_id: int) -> None:
        self.held[seq_id] = []

    def _engine_export(self, seq_id: int) -> bytes:
        raise NotImplementedError

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        raise NotImplementedError

    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        raise NotImplementedError

    def _engine_close(self) -> None:
        pass
