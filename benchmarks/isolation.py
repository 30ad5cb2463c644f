"""The time that a process of its own adds to a decode of one token, by the size of the vocabulary.

    python benchmarks/isolation.py

The backend computes nothing: a decode returns a stored row. Each line has the median of both ways in one run: the
context in this process, and the context in a process of its own. The difference does not depend on the model.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import numpy as np

from slm_core.context import ContextBase, ModelBase
from slm_core.isolation import isolated
from slm_core.protocols import BackendModel, Batch, Context
from slm_core.types import (
    BackendStatus,
    ContextOptions,
    EditLevel,
    Logits,
    ModelInfo,
    ModelOptions,
    Pos,
    SourceKind,
    Support,
)

N_TOKENS = 1000
SIZES = (32_000, 150_000)


class StoredRow(ContextBase):
    def __init__(self, options: ContextOptions, n_vocab: int) -> None:
        super().__init__(
            options,
            backend="stored",
            fingerprint="",
            n_vocab=n_vocab,
            edit_level=EditLevel.TRUNCATE,
            capabilities=frozenset(),
            payload_format="",
        )
        self._row = np.random.default_rng(0).standard_normal((1, n_vocab)).astype(np.float32)

    def _engine_decode(self, batch: Batch) -> Logits:
        return self._row

    def _engine_fork(self, src: int, dst: int, end: int) -> None: ...
    def _engine_truncate(self, seq_id: int, length: int) -> None: ...
    def _engine_cut(self, seq_id: int, start: int, end: int) -> None: ...
    def _engine_drop(self, seq_id: int) -> None: ...
    def _engine_export(self, seq_id: int) -> bytes:
        return b""

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None: ...
    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None: ...
    def _engine_close(self) -> None: ...


class Vocabulary:
    bos = eos = infill = None
    eog_ids: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        self.size = size


class StoredModel(ModelBase):
    def __init__(self, n_vocab: int) -> None:
        info = ModelInfo(Path("stored"), "stored", "llama", "", 1, 1, 1, n_vocab, 1, "F32", 4, "", None, "cpu")
        super().__init__(info, Vocabulary(n_vocab))  # type: ignore[arg-type]  # no text is encoded
        self._n_vocab = n_vocab

    def _engine_context(self, options: ContextOptions) -> Context:
        return StoredRow(options, self._n_vocab)

    def _engine_close(self) -> None: ...


class Stored:
    name = "stored"
    load_options = {"n_vocab": "the size of the vocabulary"}  # noqa: RUF012
    source_kinds = frozenset({SourceKind.FILE})

    def status(self) -> BackendStatus:
        return BackendStatus(self.name, installed=True)

    def supports(self, source: object, device: str = "auto") -> Support:
        return Support(supported=True)

    def load(self, source: object, options: ModelOptions) -> StoredModel:
        return StoredModel(int(str(options.backend_options["n_vocab"])))


def microseconds(model: BackendModel) -> float:
    """The median time of a decode of one token."""
    times = []
    with model.new_context(ContextOptions(2 * N_TOKENS)) as context:
        batch = context.new_batch()
        for i in range(N_TOKENS):
            batch.clear()
            batch.add(0, Pos(0, i), logits=True)
            start = time.perf_counter()
            context.decode(batch)
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    print(
        "| vocabulary | thread | in this process, us | in its own process, us | difference, us |\n|---|---|---|---|---|"
    )
    for n_vocab in SIZES:
        options = ModelOptions(backend_options={"n_vocab": n_vocab})
        source = Path("stored")
        with (
            Stored().load(source, options) as in_process,
            isolated(Stored(), "isolation:Stored").load(source, options) as in_child,  # type: ignore[arg-type]
        ):
            results = {"main": (microseconds(in_process), microseconds(in_child))}

            def measure(
                in_process: BackendModel = in_process,
                in_child: BackendModel = in_child,
                results: dict[str, tuple[float, float]] = results,
            ) -> None:
                results["another"] = microseconds(in_process), microseconds(in_child)

            thread = threading.Thread(target=measure)
            thread.start()
            thread.join()
            for name, (inside, outside) in results.items():
                print(f"| {n_vocab:,} | {name} | {inside:.0f} | {outside:.0f} | {outside - inside:.0f} |")


if __name__ == "__main__":
    main()
