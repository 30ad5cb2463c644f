"""A progress bar in terminals."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """The number of answered requests, and the remaining time.

    Args:
        total: the number of requests.
    """

    def __init__(self, total: int) -> None:
        columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("answers", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._progress.start()
        return lambda n: self._progress.update(self._task, completed=n)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
