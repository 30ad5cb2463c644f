"""The disk tier: stored dumps survive a restart, stay within the budget, and are never restored damaged."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import engine_process
from engine_process import GREEDY, engine_on, prompt
from scripted import ALL, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.requests import Request
from slm_core.engine.store import PrefixStore
from slm_core.engine.write_behind import WriteBehind
from slm_core.errors import InvalidOption
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel

VOCAB = ByteVocab()
TEXT = "a conversation that is long enough to be worth keeping"


def core(directory: Path, level: EditLevel = EditLevel.CUT, **options: object) -> EngineCore:
    context = ScriptedContext(n_ctx=1000, n_seq_max=6, n_batch=32, level=level)
    return EngineCore(context, EngineOptions(cache_dir=directory, **options))  # type: ignore[arg-type]


def answered_request(engine: EngineCore, tokens: list[int], **options: object) -> Request:
    request = Request(VOCAB, tokens, GREEDY, **options)  # type: ignore[arg-type]
    engine.add(request)
    while engine.step():
        pass
    return request


def tokens_alone(tokens: list[int]) -> tuple[int, ...]:
    with Session(ScriptedContext(n_ctx=1000), VOCAB) as session:
        session.append_tokens(tokens)
        return session.generate(GREEDY).run().tokens


def dumps_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.dump"))


@pytest.mark.parametrize("level", list(EditLevel))
def test_restore_then_full_prefill(tmp_path: Path, level: EditLevel) -> None:
    """A bug report against other engines. Here restored tokens are not computed again, even at edit level REPLAY."""
    with core(tmp_path, level) as engine:
        first = answered_request(engine, list(TEXT.encode()))
    history = [*TEXT.encode(), *first.answer.tokens]
    with core(tmp_path, level) as engine:
        second = answered_request(engine, [*history, *b" and more"])
        assert engine.totals.disk_tokens == second.answer.usage.cached_tokens == len(history) - 1
        assert engine.totals.computed_tokens == len(b" and more") + len(second.answer.tokens)
        assert second.answer.tokens == tokens_alone([*history, *b" and more"])


@pytest.mark.parametrize("level", list(EditLevel))
def test_a_prefix_of_a_stored_dump_is_reused(tmp_path: Path, level: EditLevel) -> None:
    """A prompt that shares the first half of the stored history reuses that half, if the context can truncate."""
    with core(tmp_path, level) as engine:
        answered_request(engine, list(TEXT.encode()))
    prompt_tokens = [*TEXT.encode()[:30], *b"something else"]
    with core(tmp_path, level) as engine:
        request = answered_request(engine, prompt_tokens)
        assert request.answer.tokens == tokens_alone(prompt_tokens)
        assert engine.totals.disk_tokens == (30 if level >= EditLevel.TRUNCATE else 0)


def test_the_same_prompt_again_computes_one_token(tmp_path: Path) -> None:
    for n_disk in (0, len(TEXT) - 1):
        with core(tmp_path) as engine:
            request = answered_request(engine, list(TEXT.encode()))
            assert engine.totals.disk_tokens == n_disk
            assert request.answer.tokens == tokens_alone(list(TEXT.encode()))


def test_salts_and_other_models_share_no_dumps(tmp_path: Path) -> None:
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()), salt="a")
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()), salt="b")
        assert engine.totals.disk_tokens == 0
    with PrefixStore(tmp_path, "another model", 1 << 20) as store:
        assert store.find(np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32), "a") is None


def test_the_salt_is_not_on_disk(tmp_path: Path) -> None:
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()), salt="a secret of the caller")
    assert all(b"a secret" not in path.read_bytes() for path in tmp_path.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in dumps_in(tmp_path))


def test_the_least_recently_used_dump_is_evicted_at_the_budget(tmp_path: Path) -> None:
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()))
    one = dumps_in(tmp_path)[0].stat().st_size
    with core(tmp_path, cache_dir_bytes=4 * one) as engine:
        for i in range(12):
            answered_request(engine, list(f"{i:02} {TEXT[3:]}".encode()))
            answered_request(engine, [*TEXT.encode(), *b" again"])  # most recently used, so it stays
            assert engine.flush(60)
            assert sum(path.stat().st_size for path in dumps_in(tmp_path)) <= 4 * one
    with core(tmp_path) as engine:
        answered_request(engine, [*TEXT.encode(), *b" again"])
        assert engine.totals.disk_tokens > 0
        answered_request(engine, list(f"00 {TEXT[3:]}".encode()))
        assert engine.totals.disk_tokens < len(TEXT) + 10


def test_a_dump_larger_than_the_budget_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), core(tmp_path, cache_dir_bytes=10) as engine:
        answered_request(engine, list(TEXT.encode()))
    assert "takes more than the 10 bytes" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["index.sqlite"]


def test_a_damaged_dump_is_reported_and_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()))
    damaged = dumps_in(tmp_path)[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with caplog.at_level(logging.WARNING), core(tmp_path) as engine:
        request = answered_request(engine, list(TEXT.encode()))
        assert request.answer.tokens == tokens_alone(list(TEXT.encode()))
        assert engine.totals.disk_tokens == 0
    assert "computed again" in caplog.text
    assert not damaged.exists()


def test_a_deleted_dump_is_ignored(tmp_path: Path) -> None:
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()))
        assert engine.flush(60)
    dumps_in(tmp_path)[0].unlink()
    with core(tmp_path) as engine:
        assert answered_request(engine, list(TEXT.encode())).answer.tokens == tokens_alone(list(TEXT.encode()))
        assert engine.totals.disk_tokens == 0


def test_a_full_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING), core(tmp_path) as engine:
        assert answered_request(engine, list(TEXT.encode())).answer.tokens == tokens_alone(list(TEXT.encode()))
    assert "no space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["index.sqlite"]


def test_partial_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()))
    old, new = tmp_path / "old.dump", tmp_path / ".new.dump.1-2.part"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    with core(tmp_path):
        assert (old.exists(), new.exists(), len(dumps_in(tmp_path))) == (False, True, 1)


def test_an_unusable_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []

    class Index(sqlite3.Connection):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            opened.append(self)

    monkeypatch.setattr(sqlite3, "connect", Index)
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(InvalidOption, match="cannot hold prefixes"):
        core(file)
    assert not opened
    (tmp_path / "index.sqlite").write_bytes(b"not a database, but long enough to be asked about" * 9)
    with pytest.raises(InvalidOption, match="cannot hold prefixes"):
        core(tmp_path)
    (index,) = opened
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        index.execute("select 1")


def test_without_payloads_there_is_no_disk_tier(tmp_path: Path) -> None:
    context = ScriptedContext(n_ctx=100, capabilities=ALL - {Capability.KV_PAYLOAD})
    with pytest.raises(InvalidOption, match="cache_dir"):
        EngineCore(context, EngineOptions(cache_dir=tmp_path))


def test_a_dump_is_not_read_if_computing_is_faster(tmp_path: Path) -> None:
    with core(tmp_path) as engine:
        answered_request(engine, list(TEXT.encode()))
    with core(tmp_path) as engine:
        for i in range(6):
            answered_request(engine, list(f"{i} costs".encode()))  # so that the costs of steps are measured
        assert engine._disk is not None
        engine._disk._seconds_per_byte = 1e3
        answered_request(engine, list(TEXT.encode()))
        assert engine.totals.disk_tokens == 0


def test_a_sequence_reclaimed_while_it_is_written_is_not_stored(tmp_path: Path) -> None:
    """Its parts are read one at a time; the partial file is removed; the waiting caller gets the error."""
    read = []

    def parts(seq_id: int) -> Iterator[bytes]:
        for i in range(100):
            read.append((seq_id, i))
            yield bytes([seq_id]) * 50

    tokens = np.arange(40, dtype=np.int32)
    with PrefixStore(tmp_path, "model", 1 << 20) as store, WriteBehind(store, parts) as behind:
        saved = [behind.add(0, tokens, ""), behind.add(1, tokens + 1, "")]
        for _ in range(30):
            behind.advance(wait=True)
        assert read == [(0, i) for i in range(30)]
        behind.forget(0)
        waits = threading.Thread(target=lambda: behind.flush(60))
        waits.start()
        while behind.is_reading:
            behind.advance(wait=True)
        waits.join(60)
        assert not waits.is_alive()
        assert behind.flush(60)
        assert [future.result(60) for future in saved] == [False, True]
        assert store.find(np.append(tokens, 0).astype(np.int32), "") is None
        entry = store.find(np.append(tokens + 1, 0).astype(np.int32), "")
        assert entry is not None
        assert b"".join(store.read(entry)) == b"\x01" * 5000
    assert len(dumps_in(tmp_path)) == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
        assert index.execute("select count(*) from prefixes").fetchone() == (1,)


def test_unsaved_dumps_are_reported(tmp_path: Path) -> None:
    with engine_on(tmp_path, cache_dir_bytes=10) as engine:
        stream = engine.submit(TEXT, GREEDY)
        stream.run()
        assert not stream.saved(60)
    with engine_on(tmp_path / "other") as engine:
        stream = engine.submit(TEXT, GREEDY)
        stream.run()
        assert stream.saved(60)
        cancelled = engine.submit(TEXT, Sampling(max_tokens=None), timeout=1e-9)
        cancelled.run()
        assert not cancelled.saved()


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    """The next process continues every dump that the killed process reported as saved, with the same tokens."""
    killed_at_random(tmp_path, random.Random(seed))


def killed_at_random(directory: Path, chosen: random.Random) -> None:
    with subprocess.Popen(
        [sys.executable, str(Path(engine_process.__file__)), str(directory)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(chosen.randrange(1, 12))]
        for _ in range(chosen.randrange(20_000)):
            pass
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    saved = [[int(word) for word in line.split()] for line in lines if line.endswith(b"\n")]
    assert saved
    with engine_on(directory) as engine:
        assert engine._core._disk is not None
        engine._core._disk.seconds = lambda stored: 0.0  # type: ignore[method-assign]  # however quick the script is
        for i, *answer in saved:
            history = [*prompt(i).encode(), *answer]
            before = engine.stats().disk_tokens
            continued = engine.submit([*history, *b" and on"], GREEDY).run()
            assert continued.usage.cached_tokens >= len(history) - 1
            assert engine.stats().disk_tokens - before == continued.usage.cached_tokens
            assert continued.tokens == tokens_alone([*history, *b" and on"])
