"""The report of a run: a table of clauses, as an HTML page, as JSON, or as a badge."""

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
"""The writers of reports, by file suffix."""


def check_paths(paths: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """The absolute paths of reports, checked. The check leaves no files.

    Raises:
        InvalidOption: an unknown suffix, or a path that cannot be written.
    """
    return tuple(_check_path(Path(path).absolute()) for path in paths)


def write(report: Report, path: Path) -> None:
    """Write a report in the format of the file suffix.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(FORMATS[path.suffix.lower()](report), encoding="utf-8")


def _check_path(path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        raise InvalidOption(f"unknown report format {path.suffix!r} of {path.name!r} (accepted: {', '.join(FORMATS)})")
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise InvalidOption(f"the report {str(path)!r} cannot be written: {error}") from error
    return path
