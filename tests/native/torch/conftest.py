"""These tests run torch with one thread: idle torch threads spin, which takes cores from other processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def patched_once() -> Iterator[None]:
    """Triton's interpreter patches ``triton.language`` once per launch, not again in each call of a device function.

    The second time it finds its own functions. Looking for them takes a third of the time of these tests.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    patch, language = interpreter._patch_lang, interpreter.tl

    def patch_if_needed(function: Any) -> Any:
        namespaces = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        used = [each for each in namespaces if each in (language, language.core)]
        if any(language.core.is_builtin(each.load) for each in used):
            return patch(function)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_if_needed)
        yield
