"""Callbacks of one request in an engine's thread: what they raise, and what they may not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_engine import GREEDY, engine_over, tokens_alone
from scripted import ScriptedContext
from slm_core.errors import SessionError
from slm_core.generation import StoppingAction
from slm_core.generation.speculation import DraftFunction, Speculation
from slm_core.sampling import Sampling

WAIT_S = 60
TEXTS = ["one", "two", "three"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("which", ["criterion", "processor", "drafter"])
def test_whatever_a_callback_raises_ends_only_its_request(which: str, error: type[BaseException]) -> None:
    def fail(*_: object) -> Any:
        raise error("of one request")

    options: dict[str, Any] = {
        "criterion": {"stopping_criteria": [fail]},
        "processor": {"logits_processors": [fail]},
        "drafter": {"speculation": Speculation(DraftFunction(fail), adaptive=False)},
    }[which]
    with engine_over(ScriptedContext(n_ctx=1000, n_seq_max=8)) as engine:
        good = [engine.submit(text, GREEDY) for text in TEXTS]
        bad = engine.submit("bad", GREEDY, **options)
        with pytest.raises(error, match="of one request"):
            bad.run()
        assert [stream.run().tokens for stream in good] == [tokens_alone(text) for text in TEXTS]
        assert engine.submit("afterwards", GREEDY).run().tokens == tokens_alone("afterwards")
        assert (engine.stats().n_failed, engine.stats().n_finished) == (1, 4)


@pytest.mark.parametrize(
    "wait", [lambda engine, other: engine.flush(0.01), lambda engine, other: other.saved(0.01)], ids=["all", "one"]
)
def test_a_callback_cannot_wait_for_the_disk(wait: Callable[..., bool], tmp_path: Path) -> None:
    """The thread that would write waits. A history that is written already can be asked for."""
    with engine_over(ScriptedContext(n_ctx=1000, n_seq_max=8), cache_dir=tmp_path) as engine:
        first = engine.submit("a first history of some length", GREEDY)
        first.run()
        assert first.saved(WAIT_S)

        def ask(*_: object) -> StoppingAction:
            assert first.saved()
            wait(engine, other)
            return StoppingAction.NEXT

        other = engine.submit("another history of some length", GREEDY)
        endless = Sampling(temperature=0, max_tokens=None, logit_bias={257: -1e9})
        asking = engine.submit(
            "a third", endless, stopping_criteria=[lambda *_: ask() if other.finished else StoppingAction.NEXT]
        )
        with pytest.raises(SessionError, match="a callback of an engine cannot wait for the disk"):
            asking.run()
        assert other.saved(WAIT_S)
