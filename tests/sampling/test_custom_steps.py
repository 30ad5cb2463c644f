"""Sampling steps of plugins: their place in the order, their options, their state and the checks of their results."""

from __future__ import annotations

import json
import types
from collections.abc import Callable

import numpy as np
import pytest

from slm_core.errors import InvalidOption, InvalidSnapshot, PluginError, SamplingError, UnknownOption
from slm_core.hookspecs import Entry, hookimpl
from slm_core.plugins import Registry
from slm_core.sampling import ORDER, SamplerChain, Sampling, Step, StepState, checks, steps

Arrays = tuple[np.ndarray, np.ndarray]
ROW = np.array([0.5, 3.0, 2.0, 1.0, -1.0, 2.5], np.float32)


def every_nth(*, n: int) -> Step:
    """A step that keeps the multiples of ``n``."""

    def step(ids: np.ndarray, logits: np.ndarray, state: StepState) -> Arrays:
        mask = ids % n == 0
        return ids[mask], logits[mask]

    return step


def lower_best(*, by: float) -> Step:
    """A step that lowers the largest logit by more with every token; its state is the sum."""

    def step(ids: np.ndarray, logits: np.ndarray, state: StepState) -> Arrays:
        off = state.memory.get("tired", 0.0)
        state.learned["tired"] = off + by
        changed = logits.copy()
        changed[logits.argmax()] -= off
        return ids, changed

    return step


def last_seen() -> Step:
    """A step that keeps the tokens of the history and stores a number in its state."""

    def step(ids: np.ndarray, logits: np.ndarray, state: StepState) -> Arrays:
        mask = np.isin(ids, state.history)
        return ids[mask], logits[mask]

    return step


def bad(*, how: str) -> Step:
    results: dict[str, Callable[[np.ndarray, np.ndarray], Arrays]] = {
        "strangers": lambda ids, logits: (ids + 1, logits),
        "nan": lambda ids, logits: (ids, logits * np.nan),
        "descending": lambda ids, logits: (ids[::-1], logits),
        "lengths": lambda ids, logits: (ids, logits[1:]),
        "none": lambda ids, logits: (ids[:0], logits[:0]),
        "twice": lambda ids, logits: (ids[[0, 0, 1]], logits[:3]),
        "another": lambda ids, logits: (ids[:1] + len(ids), logits[:1]),
    }
    return lambda ids, logits, state: results[how](ids, logits)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Registry:
    module = types.ModuleType("steps_plugin")
    entries = [
        Entry("every_nth", every_nth),
        Entry("tire", lower_best),
        Entry("last_seen", last_seen),
        Entry("bad", bad),
    ]
    module.slm_sampler_steps = hookimpl(specname="slm_sampler_steps")(lambda: entries)
    known = Registry({"steps_plugin": module})
    for user in (checks, steps):
        monkeypatch.setattr(user, "registry", lambda: known)
    return known


def neutral(*order: str, **options: object) -> Sampling:
    return Sampling.preset("neutral", order=order, seed=1, **options)


def test_a_custom_step_runs_at_its_place_in_the_order() -> None:
    first = neutral("every_nth", "top_k", custom={"every_nth": {"n": 2}}, top_k=2)
    last = neutral("top_k", "every_nth", custom={"every_nth": {"n": 2}}, top_k=2)
    assert SamplerChain(first).distribution(ROW)[0].tolist() == [0, 2]
    with pytest.raises(SamplingError, match="'every_nth' left none"):
        SamplerChain(last).distribution(ROW)  # the likeliest tokens are 1 and 5


def test_a_step_keeps_its_state_when_a_token_is_accepted() -> None:
    chain = SamplerChain(neutral("tire", "temperature", custom={"tire": {"by": 0.4}}, temperature=0))
    for _ in range(3):
        chain.distribution(ROW)
    assert [step_and_accept(chain) for _ in range(5)] == [1, 1, 5, 5, 5], (
        "after two tokens the largest logit is 0.8 lower: 2.2 < 2.5"
    )
    chain.reset()
    assert step_and_accept(chain) == 1
    twin, restored = chain.clone(), SamplerChain(chain.sampling)
    restored.set_state(chain.state())
    assert [[step_and_accept(each) for _ in range(3)] for each in (chain, twin, restored)] == [[1, 5, 5]] * 3


def step_and_accept(chain: SamplerChain) -> int:
    token = chain.sample(ROW)
    chain.accept(token)
    return token


def test_a_step_receives_the_whole_history() -> None:
    chain = SamplerChain(neutral("last_seen"))
    chain.set_history([4, *[0] * 500])
    assert chain.distribution(ROW)[0].tolist() == [0, 4]


def test_options_of_a_custom_step_survive_a_dict() -> None:
    options = neutral("every_nth", custom={"every_nth": {"n": 3}})
    assert Sampling.from_dict(json.loads(json.dumps(options.to_dict()))) == options


@pytest.mark.parametrize("how", ["strangers", "nan", "descending", "lengths", "none", "twice", "another"])
def test_the_result_of_a_custom_step_is_checked(how: str) -> None:
    chain = SamplerChain(neutral("bad", custom={"bad": {"how": how}}))
    with pytest.raises(SamplingError, match="'bad'"):
        chain.sample(ROW)


def test_a_step_cannot_change_the_ids_of_other_chains() -> None:
    def forgetful(ids: np.ndarray, logits: np.ndarray, state: StepState) -> Arrays:
        ids[0] = 3
        return ids, logits

    chain = SamplerChain(neutral("bad", custom={"bad": {"how": "none"}}))
    chain._steps = [("forgetful", forgetful)]
    with pytest.raises(ValueError, match="read-only"):
        chain.sample(ROW)


def test_wrong_options_of_a_custom_step_are_refused() -> None:
    with pytest.raises(InvalidOption, match=r"'every_nth'.*'m'"):
        SamplerChain(neutral("every_nth", custom={"every_nth": {"m": 2}}))
    with pytest.raises(InvalidOption, match="order names"):
        Sampling(custom={"every_nth": {"n": 2}})
    with pytest.raises(InvalidOption, match="order names"):
        Sampling.preset("neutral", order=("top_k",), custom={"top_k": {"n": 2}})
    with pytest.raises(InvalidOption, match="JSON"):
        neutral("every_nth", custom={"every_nth": {"n": object()}})
    for wrong in ([], {"every_nth": 2}):
        with pytest.raises(InvalidOption, match=r"custom=.*accepted: a mapping from names of steps to mappings"):
            neutral("every_nth", custom=wrong)
    with pytest.raises(UnknownOption, match=r"'tyre'.*accepted:.*top_k.*tire"):
        neutral("tyre")


def test_a_plugin_may_not_take_the_name_of_a_built_in_step(registered: Registry) -> None:
    module = types.ModuleType("thief")
    module.slm_sampler_steps = hookimpl(specname="slm_sampler_steps")(lambda: [Entry("top_k", every_nth)])
    registered.add("thief", module)
    with pytest.raises(PluginError, match="'top_k', which is built in"):
        Sampling(order=ORDER)


def test_a_dump_with_an_unknown_step_is_refused() -> None:
    from slm_core.chat.session_dump import read_sampling

    options = neutral("every_nth", custom={"every_nth": {"n": 3}}).to_dict()
    options["order"] = ["no_such_step"]
    with pytest.raises(InvalidSnapshot, match="no_such_step"):
        read_sampling(options)
