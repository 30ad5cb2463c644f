"""Tools from a file: functions of Python, or JSON schemas."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path

from slm_core.cli.files import read_text
from slm_core.errors import InvalidOption
from slm_core.toolschema import tool_schemas
from slm_core.types import Tool
from slm_core.user_paths import expanded


def read_tools(path: Path) -> list[Tool]:
    """The public functions of a Python file, which runs, or the schemas of a JSON file.

    Raises:
        InvalidOption: the file cannot be run or read, or contains no tool.
        OSError: there is no such JSON file.
    """
    path = expanded(path)
    tools = _functions(path) if path.suffix == ".py" else _schemas(path)
    if not tools:
        raise InvalidOption(f"{path} contains no tools (accepted: functions in FILE.py, schemas in FILE.json)")
    tool_schemas(tools)
    return tools


def _functions(path: Path) -> list[Tool]:
    if not path.is_file():
        raise InvalidOption(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location("slm_chat_tools", path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any error of the user's file
        raise InvalidOption(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    own = [f for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
    tools: list[Tool] = [function for function in own if not function.__name__.startswith("_")]
    awaited = [function.__name__ for function in own if inspect.iscoroutinefunction(function)]
    if awaited:
        raise InvalidOption(f"{path}: {awaited[0]} is async (accepted: functions that are not)")
    return tools


def _schemas(path: Path) -> list[Tool]:
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidOption(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, list) else [value]
