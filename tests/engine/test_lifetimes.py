"""Engines whose model is closed first, and callbacks that wait for their own engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

import slm_core as slm
from slm_core.errors import EngineClosed

ENDLESS = slm.Sampling(max_tokens=4000, min_tokens=4000)
CALLBACK = """
import slm_core as slm

def another(event, draft):
    return bool(engine.submit("Hi", few).run().text)

few = slm.Sampling(max_tokens=2)
with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model, model.engine(n_ctx=256) as engine:
    try:
        engine.submit("Hello", few, stopping_criteria=[another]).run()
    except slm.SessionError as error:
        print(error)
    print(len(engine.submit("Hello", few).run().tokens))
"""


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_model_closes_its_engines(is_busy: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model:
        engine = model.engine(n_ctx=4096)
        stream = engine.submit("Hello", ENDLESS if is_busy else slm.Sampling(max_tokens=1))
        next(stream)
        if not is_busy:
            stream.run()
    with pytest.raises(EngineClosed, match=r"^the engine is closed$"):
        engine.submit("Hello")
    if is_busy:
        with pytest.raises(EngineClosed):
            stream.run()
    assert capfd.readouterr().err == ""


def test_a_callback_that_waits_for_its_own_engine_fails_its_request() -> None:
    """Without the error the engine would wait for itself, also at the end of the program."""
    ended = subprocess.run([sys.executable, "-c", CALLBACK], capture_output=True, text=True, timeout=20, check=False)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["a callback of an engine cannot wait for another answer of the engine", "2"]
