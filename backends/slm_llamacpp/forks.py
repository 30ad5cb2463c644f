"""llama.cpp in a process that was forked: it computes with one thread."""

from __future__ import annotations

import os
from typing import Any

from slm_llamacpp import logs

_computed_in: int | None = None  # the process that computed first: this process, or an ancestor of it
_warned = False


def before_computing(api: Any, context: int) -> None:
    """Give a context one thread if an ancestor of this process has computed with llama.cpp, with one warning.

    A fork copies no threads, but GNU's OpenMP, which llama.cpp is built with, expects the threads of the parent. With
    two threads or more it would wait for these threads for ever.
    """
    global _computed_in, _warned
    process = os.getpid()
    if _computed_in is None:
        _computed_in = process
    if _computed_in == process:
        return
    api.llama_set_n_threads(context, 1, 1)
    if not _warned:
        _warned = True
        logs.logger.warning(
            "llama.cpp computes with one thread here: the process that forked this one has used llama.cpp's threads"
            " (the start method 'spawn' of multiprocessing avoids it)"
        )
