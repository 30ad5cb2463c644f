"""``copy`` and ``pickle`` of objects that own memory: a copy of llama.cpp's context would free its memory twice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import slm_core as slm


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copy_and_pickle_refuse_what_owns_memory(copied: Callable[[object], object]) -> None:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model, model.engine(n_ctx=64) as engine:
        chat = model.chat(n_ctx=64)
        context = model.new_context(n_ctx=64)
        for owner in (chat, chat.session, context, model, engine):
            with pytest.raises(TypeError, match=f"refuse a {type(owner).__name__}, which .*: make another"):
                copied(owner)


def test_copy_and_pickle_take_values() -> None:
    sampling = slm.Sampling(temperature=0, max_tokens=4)
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model:
        beams = slm.Beams(width=2, logit_bias={3: 1.0})
        values = (sampling, beams, model.generate("Hello", sampling), model.info, slm.Message("user", "Hello"))
    for value in values:
        assert copy.deepcopy(value) == copy.copy(value) == pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    "error",
    [
        slm.ContextFull(3, 2, seq_id=1),
        slm.RequestsFailed(["an answer", None], {1: slm.ContextFull(3, 2)}),
        slm.ToolError("get_weather: no", slm.ToolCall("get_weather", {"city": "Rome"})),
        slm.ConstraintError("no", line=1, column=2),
        slm.ModelFileNotFound("no file"),
        slm.MissingExtra("no library"),
        slm.InvalidSequence("taken", seq_id=4),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_whole(error: slm.SlmError) -> None:
    """``concurrent.futures`` gives up its pool, and ``multiprocessing.Pool`` waits for ever, if an error does not."""
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is type(error)
        assert (str(copied), repr(vars(copied))) == (str(error), repr(vars(error)))
