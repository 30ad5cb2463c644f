"""Every text file is read and written as UTF-8, whatever the system's default encoding is (Windows: a code page)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("slm_core", "backends", "conformance", "formatters", "examples")
MODULES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def calls_without_encoding(source: str) -> list[str]:
    """Calls that open text without ``encoding=``: files, and pipes of subprocesses."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"line {call.lineno}: {ast.unparse(call)[:80]}" for call in calls if _opens_text(call)]


def _opens_text(call: ast.Call) -> bool:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in named or None in named:
        return False
    match call.func:
        case ast.Attribute(attr="read_text"):
            return not call.args
        case ast.Attribute(attr="write_text"):
            return len(call.args) < 2
        case ast.Name(id="open"):
            return _is_text_mode(call.args[1:], named)
        case ast.Attribute(value=ast.Name(id="os" | "webbrowser" | "tarfile" | "zipfile" | "wave"), attr="open"):
            return False
        case ast.Attribute(attr="open"):
            return _is_text_mode(call.args, named)
        case ast.Attribute(attr="NamedTemporaryFile" | "TemporaryFile"):
            return _is_text_mode(call.args or [named.get("mode", ast.Constant("w+b"))], named)
    is_text = named.get("text", named.get("universal_newlines"))
    return isinstance(is_text, ast.Constant) and is_text.value is True


def _is_text_mode(arguments: list[ast.expr], named: dict[str | None, ast.expr]) -> bool:
    mode = arguments[0] if arguments else named.get("mode", ast.Constant("r"))
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_text_has_an_encoding(folder: str) -> None:
    calls_by_file = {
        str(file.relative_to(ROOT)): calls
        for file in MODULES
        if file.is_relative_to(ROOT / folder) and (calls := calls_without_encoding(file.read_text(encoding="utf-8")))
    }
    assert not calls_by_file


@pytest.mark.parametrize(
    "call",
    [
        "open(path)",
        "open(path, 'w')",
        "path.open()",
        "path.open('a', newline='')",
        "path.read_text()",
        "path.write_text(text)",
        "subprocess.run(command, text=True)",
        "tempfile.NamedTemporaryFile('w')",
    ],
)
def test_the_check_sees_text(call: str) -> None:
    assert calls_without_encoding(call)


@pytest.mark.parametrize(
    "call",
    [
        "open(path, 'rb')",
        "open(path, encoding='utf-8')",
        "path.open('rb')",
        "os.open(path, flags)",
        "path.read_bytes()",
        "path.read_text('utf-8')",
        "path.read_text(encoding='utf-8')",
        "subprocess.run(command)",
        "subprocess.run(command, text=True, encoding='utf-8')",
        "tempfile.NamedTemporaryFile()",
    ],
)
def test_the_refuse_object_bytes_and_encodings(call: str) -> None:
    assert not calls_without_encoding(call)
