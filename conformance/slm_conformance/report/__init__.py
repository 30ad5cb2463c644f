"""The report of a run: a table of clauses, as a page, as data, or as a badge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from slm_conformance.report.badge import svg_badge
from slm_conformance.report.data import json_data
from slm_conformance.report.page import html_page
from slm_conformance.report.record import Report
from slm_core.errors import InvalidOption

__all__ = ["FORMATS", "check_paths", "write"]

FORMATS: dict[str, Callable[[Report], str]] = {".html": html_page, ".json": json_data, ".svg": svg_badge}
"""By suffix, what makes the text of a report."""


def check_paths(paths: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """The absolute paths of reports that can be written; nothing is left behind by trying.

    Raises:
        InvalidOption: an unknown suffix, or a place that cannot be written to.
    """
    return tuple(_check_path(Path(path).absolute()) for path in paths)


def write(report: Report, path: Path) -> None:
    """Write a report in the format that the path's suffix names.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(FORMATS[path.suffix.lower()](report), encoding="utf-8")


def _check_path(path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        raise InvalidOption(f"unknown report format {path.suffix!r} of {path.name!r} (accepted: {', '.join(FORMATS)})")
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise InvalidOption(f"the report {str(path)!r} cannot be written: {error}") from error
    return path
