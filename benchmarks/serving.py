"""``slm serve`` compared with its engine in this process, and with llama-server.

    python benchmarks/serving.py MODEL.gguf --llama-server PROGRAM [--rounds 3] [--out benchmarks/results] [--quick]

All take turns and use one thread per core. The servers answer the same prompts over HTTP, as token ids, with greedy
answers of fixed length; ``benchmarks/engine.py`` has the measurements. The servers are restarted for each of them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from http_servers import SlmServer

import slm_core as slm
from engine import Ours, OverHttp, llama_server, write_table
from slm_core.cpu import usable_cores


def streams(engine: Ours, ours: OverHttp, theirs: OverHttp, seed: int) -> dict[str, float]:
    """The rates of 16 streams, and the times of one."""
    direct, rate, their_rate = engine.streams(seed), ours.streams(seed), theirs.streams(seed)
    first, their_first = ours.one_stream(seed + 1), theirs.one_stream(seed + 1)
    return {
        "16 streams of 128 + 128 in this process, tokens/s": direct,
        "16 streams of 128 + 128, tokens/s": rate,
        "llama-server: 16 streams of 128 + 128, tokens/s": their_rate,
        "16 streams: slm serve over its engine": rate / direct,
        "16 streams: slm serve over llama-server": rate / their_rate,
        "one prompt of 128: first token, ms": first * 1e3,
        "llama-server: one prompt of 128: first token, ms": their_first * 1e3,
        "one prompt of 128: first token over llama-server": first / their_first,
    }


def waits(ours: OverHttp, on_disk: OverHttp, theirs: OverHttp, seed: int) -> dict[str, float]:
    """The rest of the engine's table, over HTTP."""
    cold, warm = ours.shared_prompt(seed + 2)
    their_cold, their_warm = theirs.shared_prompt(seed + 2)
    gap, their_gap = ours.long_prompt(seed + 3), theirs.long_prompt(seed + 3)
    chats, their_chats = on_disk.chats(seed + 4), theirs.chats(seed + 4)
    return {
        "16 prompts share 2,048 tokens: first token p95 cold, s": cold,
        "16 more prompts that share them: first token p95 warm, s": warm,
        "8 streams, a 4,096-token prompt comes: gap p99, ms": gap * 1e3,
        "32 chats, 8 fit: first token p50, s": chats,
        "over llama-server: first token cold": cold / their_cold,
        "over llama-server: first token warm": warm / their_warm,
        "over llama-server: gap": gap / their_gap,
        "over llama-server: chats": chats / their_chats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="only the rates of 16 streams and the times of one")
    parser.add_argument("--out", type=Path, help="a folder for the table")
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with slm.load(options.model, n_threads=usable_cores()) as model, tempfile.TemporaryDirectory() as folder:
        engine, eog_ids = Ours(model, 0), list(model.vocab.eog_ids)
        ours = OverHttp(lambda n_ctx, n_parallel: SlmServer(options.model, n_ctx, n_parallel, eog_ids))
        on_disk = OverHttp(
            lambda n_ctx, n_parallel: SlmServer(
                options.model, n_ctx, n_parallel, eog_ids, ["--cache-dir", tempfile.mkdtemp(dir=folder)]
            )
        )
        theirs = llama_server(options.llama_server, options.model)
        for turn in range(options.rounds):
            measured = streams(engine, ours, theirs, 1000 * turn)
            if not options.quick:
                measured |= waits(ours, on_disk, theirs, 1000 * turn)
            for name, value in measured.items():
                rows.setdefault(name, []).append(value)
                print(f"{turn}  {name}: {value:.4g}", flush=True)
    write_table(f"serving-{options.model.stem}", rows, options)


if __name__ == "__main__":
    main()
