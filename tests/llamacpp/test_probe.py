"""The probe of llama.cpp: its outcomes, the cached verdicts, and a run on this machine."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slm_core.errors import BackendUnavailable
from slm_core.types import ModelOptions
from slm_llamacpp import backend, probe
from slm_llamacpp.probe import Outcome


def probe_of(*outcomes: Outcome) -> tuple[Callable[[bool], Outcome], list[bool]]:
    """A fake probe with the given outcomes, and the list of its arguments."""
    calls: list[bool] = []
    remaining = list(outcomes)

    def run(repack: bool) -> Outcome:
        calls.append(repack)
        return remaining.pop(0)

    return run, calls


@pytest.mark.parametrize(
    ("outcomes", "may_repack", "is_cached"),
    [
        ([Outcome.PASSED], True, True),
        ([Outcome.INCONCLUSIVE], True, False),
        ([Outcome.CRASHED, Outcome.PASSED], False, True),
        ([Outcome.CRASHED, Outcome.INCONCLUSIVE], False, False),
    ],
)
def test_verdicts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, outcomes: list[Outcome], may_repack: bool, is_cached: bool
) -> None:
    file = tmp_path / "deep" / "verdict.json"
    run, calls = probe_of(*outcomes)
    assert probe.remembered(file, run) is may_repack
    assert calls == [True, False][: len(outcomes)]
    assert bool(caplog.records) is (outcomes != [Outcome.PASSED]), "every outcome except a pass is logged"
    second_run, calls = probe_of(Outcome.PASSED)
    assert probe.remembered(file, second_run) is (may_repack if is_cached else True)
    assert calls == ([] if is_cached else [True])


def test_a_build_that_always_crashes_is_unavailable(tmp_path: Path) -> None:
    run, _ = probe_of(Outcome.CRASHED, Outcome.CRASHED)
    with pytest.raises(BackendUnavailable, match="crashes on this CPU"):
        probe.remembered(tmp_path / "verdict.json", run)
    assert not (tmp_path / "verdict.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"repack": "yes"}', "null", "\xff"])
def test_a_damaged_verdict_is_replaced(tmp_path: Path, text: str) -> None:
    file = tmp_path / "verdict.json"
    file.write_bytes(text.encode("latin-1"))
    for outcomes in ([Outcome.CRASHED, Outcome.PASSED], []):
        run, _ = probe_of(*outcomes)
        assert probe.remembered(file, run) is False
    assert [path.name for path in tmp_path.iterdir()] == ["verdict.json"], "temporary files are left"


def test_the_probe_works_without_a_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run, calls = probe_of(Outcome.PASSED, Outcome.PASSED)
    for _ in range(2):
        assert probe.remembered(tmp_path / "file" / "verdict.json", run) is True
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("pass", Outcome.PASSED),
        ("raise SystemExit(1)", Outcome.INCONCLUSIVE),
        ("import nothing_of_this_name", Outcome.INCONCLUSIVE),
        *(
            (f"import os; os.kill(os.getpid(), {int(number)})", Outcome.CRASHED)
            for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGABRT)
        ),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", Outcome.INCONCLUSIVE),
    ],
)
def test_outcomes_of_processes(script: str, outcome: Outcome) -> None:
    assert probe.outcome_of([sys.executable, "-S", "-c", script]) is outcome


def test_a_probe_that_cannot_start_or_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert probe.outcome_of([str(tmp_path / "nothing")]) is Outcome.INCONCLUSIVE
    monkeypatch.setattr(probe, "_TIMEOUT", 0.2)
    hangs = "import threading; threading.Event().wait()"
    assert probe.outcome_of([sys.executable, "-S", "-c", hangs]) is Outcome.INCONCLUSIVE
    monkeypatch.setattr(sys, "executable", "")
    assert probe.run(True) is Outcome.INCONCLUSIVE


def has_amx() -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "amx_tile" in flags.read_text().split()


def test_the_probe_passes_here_without_repacking(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "slm_llamacpp"):
        assert probe.run(False) is Outcome.PASSED, caplog.text


def test_the_probe_with_repacking_passes_or_hits_the_known_crash(caplog: pytest.LogCaptureFixture) -> None:
    """Builds by gcc 12 crash on processors with AMX, and only there."""
    expected = {Outcome.PASSED, Outcome.CRASHED} if has_amx() else {Outcome.PASSED}
    with caplog.at_level(logging.WARNING, "slm_llamacpp"):
        assert probe.run(True) in expected, caplog.text


def test_the_key_depends_on_library_and_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"one build")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    keys = {probe.build_key(), probe.build_key()}
    assert len(keys) == 1
    library.write_bytes(b"another build")
    keys.add(probe.build_key())
    monkeypatch.setattr(probe, "_cpu", lambda: "another CPU")
    keys.add(probe.build_key())
    assert len(keys) == 3


def test_the_verdict_is_stored_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Path] = []
    monkeypatch.setenv("SLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(probe, "remembered", lambda path, run: calls.append(path) or True)
    assert probe.may_repack.__wrapped__()
    assert [path.parent for path in calls] == [tmp_path]


@pytest.mark.parametrize(
    ("verdict", "options", "expected"), [(False, {}, False), (True, {}, True), (True, {"repack": False}, False)]
)
def test_models_are_loaded_as_the_verdict_allows(
    monkeypatch: pytest.MonkeyPatch, llama_file: Path, verdict: bool, options: dict[str, object], expected: bool
) -> None:
    monkeypatch.setattr(probe, "may_repack", lambda: verdict)
    repack_flags: list[bool] = []
    load = backend.LlamaCppModel

    def recording_load(api: object, gguf: object, file: object, settings: backend.Settings, progress: object) -> object:
        repack_flags.append(settings.repack)
        return load(api, gguf, file, settings, progress)

    monkeypatch.setattr(backend, "LlamaCppModel", recording_load)
    backend.LlamaCppBackend().load(llama_file, ModelOptions(n_threads=1, backend_options=options)).close()
    assert repack_flags == [expected]
