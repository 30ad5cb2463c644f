"""Cost of adapters (LoRA): time of decoding and of prompts relative to the time without adapters, by rank and number.

    python benchmarks/adapters.py --model my.gguf
    python benchmarks/adapters.py --model my.gguf --rank 16 64 --stack 1 4 --sets 1 4 --backend native llamacpp

All cases of a row take turns, step by step, so a change of the machine's speed affects each of them. Adapters change
all seven matrices of each block. A stack is several adapters of one sequence; sets are sequences of one batch with one
adapter each, relative to the same number of sequences without adapters.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
from cpu import machine

import slm_core as slm
from slm_core.adapters import Adapter, LowRank, write_adapter
from slm_core.gguf import GgufFile
from slm_core.model import Model
from slm_core.types import AdapterInfo, ContextOptions

KINDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
N_PROMPT, N_DEPTH = 512, 64


def make_adapter(model: Path, rank: int, seed: int, target: Path) -> Path:
    """Write a random adapter that changes all matrices of ``KINDS``."""
    rng, changes = np.random.default_rng(seed), {}
    with GgufFile.open(model) as file:
        for name, info in file.tensors.items():
            if name.removesuffix(".weight").rpartition(".")[2] in KINDS and len(info.shape) == 2:
                a = rng.normal(scale=0.02, size=(rank, info.shape[1])).astype(np.float32)
                b = rng.normal(scale=0.02, size=(info.shape[0], rank)).astype(np.float32)
                changes[name] = LowRank(a, b, 1.0)
        architecture = file.require("general.architecture", str)
    info = AdapterInfo(target.stem, target, "", rank, 0, ())
    write_adapter(Adapter(info, changes), architecture, target)
    return target


class Case:
    """Contexts that decode the same tokens, each with adapters of its own.

    Args:
        model: the model.
        sets: the adapters of each sequence of the batch.
    """

    def __init__(self, model: Model, sets: Sequence[Mapping[str, float]]) -> None:
        self._n = len(sets)
        options = ContextOptions(n_ctx=self._n * 1024, n_seq_max=self._n, n_batch=N_PROMPT)
        self._context = model.model.new_context(options)
        for seq_id, scales in enumerate(sets):
            self._context.set_adapters(seq_id, scales)
        self._batch = self._context.new_batch()

    def prompt(self) -> float:
        """Seconds of a prompt in the first sequence."""
        self._context.drop(0)
        self._batch.clear()
        self._batch.extend(range(5, 5 + N_PROMPT), slm.Pos(0, 0), logits="last")
        return self._timed()

    def begin(self) -> None:
        """Fill all sequences to the depth of ``step``."""
        for seq_id in range(self._n):
            self._context.drop(seq_id)
            self._batch.clear()
            self._batch.extend(range(5, 5 + N_DEPTH), slm.Pos(seq_id, 0))
            self._context.decode(self._batch)

    def step(self) -> float:
        """Seconds of one token of each sequence."""
        self._batch.clear()
        for seq_id in range(self._n):
            self._batch.add(7 + seq_id, slm.Pos(seq_id, self._context.length(seq_id)), logits=True)
        return self._timed()

    def _timed(self) -> float:
        start = time.perf_counter()
        self._context.decode(self._batch)
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the context."""
        self._context.close()


def in_turns(cases: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median seconds of each case."""
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, times in zip(cases, seconds, strict=True):
            times.append(case())
    return [median(times) for times in seconds]


def compare(model: Model, plain: Case, adapted: Case, steps: int, prompts: int) -> tuple[float, float, float]:
    """Tokens per second without adapters, and the times with adapters over those without: decoding, prompts."""
    for case in (plain, adapted):
        case.begin()
    without, with_adapters = in_turns([plain.step, adapted.step], steps)
    prompt_without, prompt_with = in_turns([plain.prompt, adapted.prompt], prompts)
    return 1 / without, with_adapters / without, prompt_with / prompt_without


def measure(args: argparse.Namespace, backend: str, folder: Path) -> list[str]:
    """The rows of one backend."""
    rows = []
    with slm.load(args.model, backend=backend, n_threads=args.threads) as model:
        most, ranks = max(*args.stack, *args.sets, 1), sorted({*args.rank, args.rank[0]})
        for rank in ranks:
            for i in range(most if rank == ranks[0] else 1):
                path = make_adapter(args.model, rank, i, folder / f"{backend}-{rank}-{i}.gguf")
                model.adapters.load(path, f"{rank}-{i}")
        cases = [(f"rank {rank}", [{f"{rank}-0": 1.0}]) for rank in ranks]
        cases += [(f"{n} of rank {ranks[0]}, added", [{f"{ranks[0]}-{i}": 1.0 for i in range(n)}])
                  for n in args.stack if n > 1]  # fmt: skip
        cases += [(f"{n} sequences, an adapter each", [{f"{ranks[0]}-{i}": 1.0} for i in range(n)])
                  for n in args.sets if n > 1]  # fmt: skip
        for name, sets in cases:
            plain, adapted = Case(model, [{} for _ in sets]), Case(model, sets)
            speed, decode, prompt = compare(model, plain, adapted, args.steps, args.prompts)
            plain.close(), adapted.close()
            rows.append(f"| {backend} | {name} | {len(sets) * speed:,.1f} | {decode:.3f} | {prompt:.3f} |")
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=slm.demo_model_path())
    parser.add_argument("--backend", nargs="+", default=["native"])
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--stack", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--sets", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=200, help="decoded tokens of each case")
    parser.add_argument("--prompts", type=int, default=7, help="prompts of each case")
    parser.add_argument("--out", type=Path, help="folder of the dated table")
    args = parser.parse_args()
    head = [
        f"# Adapters, {date.today().isoformat()}",
        "",
        f"{machine()}; {args.model.name}, {args.steps} tokens behind {N_DEPTH}, prompts of {N_PROMPT}, in turns.",
        "Times with adapters over times without.",
        "",
        "| backend | adapters | tokens/s without | decoding | prompts |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for backend in args.backend for row in measure(args, backend, Path(folder))]
    if args.out is not None:
        target = args.out / f"adapters-{date.today().isoformat()}.md"
        target.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
