"""The programs of examples/: what they print, and how long they are."""

from __future__ import annotations

import ast
import io
import re
import runpy
from pathlib import Path

import pytest

import slm_core as slm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cookbook.md").read_text()
ROWS = re.findall(r"^\| \[(\w+)\.py\]\(\.\./examples/\w+\.py\) \|[^|]+\| (\d+) \| (\w+) (\d+)", PAGE, re.MULTILINE)
PEERS = {
    name: (peer, code) for name, peer, code in re.findall(r"^`(\w+)`, (\w+):\n\n```py\n(.*?)```", PAGE, re.M | re.S)
}
PRINTED = {
    "async_users": "12 + 30 = 42\nb-a-n-a-n-a\n",
    "chat_loop": "> What a nice name!\n> Your dog is called Rex.\n> ",
    "history": "Your dog is called Rex.\n",
    "json_by_schema": "name='Ada' city='Oslo'\n",
    "many_prompts": "12 + 30 = 42\nb-a-n-a-n-a\n"
    "I can remember facts, add and subtract, spell words, write JSON and call a weather tool.\n",
    "one_answer": "12 + 30 = 42\n",
    "resume": "Your dog is called Rex.\n",
    "search": "My dog is called Rex.\n",
    "stream": "I can remember facts, add and subtract, spell words, write JSON and call a weather tool.",
    "tool_calls": "It is sunny in Rome, 21 degrees.\n",
}


def n_lines(code: str) -> int:
    """Lines with code: without empty lines, comments and docstrings."""
    tree = ast.parse(code)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(code.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and i not in docstrings for i, line in lines)


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "examples").glob("*.py"))])
def test_a_program_prints_its_answer(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "resume" and not next(s for s in slm.backends() if s.name == "llamacpp").installed:
        pytest.skip("the backend llamacpp is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("My dog is called Rex.\nWhat is my dog called?\n\n"))
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    if name == "classify":
        probabilities = dict(zip(["red", "green", "blue"], map(float, re.findall(r"0\.\d+", printed)), strict=True))
        assert (
            printed.startswith("Choice(value='green'") and max(probabilities, key=probabilities.__getitem__) == "green"
        )
    elif name == "perplexity":
        likely, unlikely = (float(line.split()[0]) for line in printed.splitlines())
        assert likely < unlikely / 10
    else:
        assert printed == PRINTED[name]


def test_the_page_lists_every_program() -> None:
    assert [name for name, *_ in ROWS] == list(PEERS)
    assert sorted(PEERS) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(("name", "n_ours", "peer", "n_peers"), ROWS, ids=[row[0] for row in ROWS])
def test_a_program_is_no_longer_than_the_shortest_peers(name: str, n_ours: str, peer: str, n_peers: str) -> None:
    code = (ROOT / "examples" / f"{name}.py").read_text()
    counted, counted_peer = n_lines(code), n_lines(PEERS[name][1])
    assert counted <= counted_peer
    assert (counted, PEERS[name][0], counted_peer) == (int(n_ours), peer, int(n_peers))
    assert len(code.splitlines()) <= 30
