"""llama.cpp's log: one record per line, at its level, and nothing on stderr."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from slm_llamacpp import logs

DEBUG, INFO, WARNING, ERROR, CONTINUATION = 1, 2, 3, 4, 5  # ggml_log_level


def test_lines_are_joined_and_levels_mapped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "slm_llamacpp")
    logs.receive(INFO, b"loading ", None)
    for dot in (b".", b".", b" done\nnext: "):
        logs.receive(CONTINUATION, dot, None)
    logs.receive(WARNING, b"two\nlines\n", None)
    logs.receive(ERROR, b"caf\xc3\xa9 \xff\n", None)
    logs.receive(DEBUG, b"", None)
    logs.receive(DEBUG, b"no end", None)
    logs.receive(INFO, b"\n", None)
    assert [(level, line) for _, level, line in caplog.record_tuples] == [
        (logging.INFO, "loading .. done"),
        (logging.INFO, "next: "),
        (logging.WARNING, "two"),
        (logging.WARNING, "lines"),
        (logging.ERROR, "café \N{REPLACEMENT CHARACTER}"),
        (logging.DEBUG, "no end"),
        (logging.INFO, ""),
    ]


def test_complaints_go_to_the_innermost_collector() -> None:
    with logs.collected() as outer:
        logs.receive(ERROR, b"first\n", None)
        with logs.collected() as inner:
            logs.receive(WARNING, b"second\n", None)
            logs.receive(INFO, b"chatter\n", None)
    logs.receive(ERROR, b"nobody's\n", None)
    assert [line for _, line in outer] == ["first"]
    assert [line for _, line in inner] == ["second"]


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ([], "it gave no reason"),
        (["llama_decode: failed"], "failed"),
        (["llama_model_load: error loading model: no key", "llama_model_load_from_file: failed"], "no key"),
        (["GGML: first", "plain words: second"], "plain words: second"),
    ],
)
def test_the_reason(errors: list[str], reason: str) -> None:
    complaints = [logs.Complaint(logging.WARNING, "f: not this"), *(logs.Complaint(logging.ERROR, e) for e in errors)]
    assert logs.reason_in(complaints) == reason


def test_nothing_on_stderr(llama_file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from slm_core.types import ContextOptions, ModelOptions;"
        "from slm_llamacpp.backend import LlamaCppBackend;"
        "model = LlamaCppBackend().load(Path(sys.argv[1]), ModelOptions(n_threads=1));"
        "model.new_context(ContextOptions(n_ctx=4096))"  # longer than its training context: a warning
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(llama_file)], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
