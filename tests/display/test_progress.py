"""The progress bar of a notebook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import slm_core as slm
from display.parsed_html import checked

PROMPTS = ["My dog is called", "Once upon a time", "Hello!", "What is 12 + 30?"]


class Page:
    """What a notebook would show of a displayed object, version by version."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.lines: list[str] = []

    def display(self, thing: object, *, display_id: bool) -> Page:
        assert display_id
        self.update(thing)
        return self

    def update(self, thing: object) -> None:
        self.versions.append(checked(thing._repr_html_()).text)  # type: ignore[attr-defined]
        self.lines.append(repr(thing))


def test_a_notebook_sees_the_answers_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    page = Page()
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: SimpleNamespace(config={"IPKernelApp": {}}))
    monkeypatch.setattr("IPython.display.display", page.display)
    monkeypatch.setattr("slm_core.display.notebook._REFRESH_S", 0)
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model:
        model.generate(PROMPTS, slm.Sampling(temperature=0, max_tokens=8), n_parallel=1)
        assert page.lines[0] == "0 of 4 answers" and page.lines[-1] == "4 of 4 answers"
        assert {f"{n} of 4 answers" for n in range(5)} == set(page.lines)
        assert all(line in version for line, version in zip(page.lines, page.versions, strict=True))
        n_shown = len(page.lines)
        model.generate(PROMPTS[0], slm.Sampling(temperature=0, max_tokens=2))
        model.generate(PROMPTS, slm.Sampling(temperature=0, max_tokens=2), progress=False)
        assert len(page.lines) == n_shown, "one prompt, or progress=False: no bar"
