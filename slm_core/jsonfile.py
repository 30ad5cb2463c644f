"""JSON files of model directories, read with bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slm_core.errors import InvalidModelFile, ModelFileNotFound
from slm_core.lfs import refuse_pointer

_MAX_BYTES = 256 << 20
_MAX_DEPTH = 100


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        InvalidModelFile: it is missing (``ModelFileNotFound``), too large, nested too deep, or not a JSON object.
    """
    try:
        is_file = path.is_file()
        if is_file and path.stat().st_size > _MAX_BYTES:
            raise InvalidModelFile(f"{path}: larger than {_MAX_BYTES} bytes")
        content = path.read_bytes() if is_file else b"null"
        refuse_pointer(path, content)
        data = json.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{path}: cannot be read as JSON: {str(error)[:200]}") from None
    if not is_file:
        raise ModelFileNotFound(f"{path}: no such file")
    if not isinstance(data, dict):
        raise InvalidModelFile(f"{path}: not a JSON object")
    if (depth := depth_of(data)) > _MAX_DEPTH:
        raise InvalidModelFile(f"{path}: nests {depth} levels (accepted: {_MAX_DEPTH})")
    return data


def depth_of(value: object) -> int:
    """The nesting depth of a JSON value: 0 for a scalar. Not recursive, because Python bounds the recursion depth."""
    depth, level = 0, [value]
    while any(isinstance(one, dict | list) for one in level):
        depth += 1
        level = [inner for one in level for inner in _inside(one)]
    return depth


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
