"""Check the types in the Python blocks of the documentation and in examples/, as a reader's mypy and pyright would.

    python tools/check_examples.py

Each page becomes a module whose lines are those of the page. mypy is strict, as in pyproject.toml. pyright is
basedpyright in pyright's standard mode, which needs no download besides its wheel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCES = [str(ROOT / folder) for folder in (".", "backends", "formatters", "conformance")]
# Later blocks of a page may define a name again: they are read one after the other.
MYPY = ["mypy", "--allow-redefinition", "--disable-error-code=no-redef", "--no-error-summary"]
PYRIGHT = {"typeCheckingMode": "standard", "reportRedeclaration": False, "reportUnusedExpression": False}


def module_of(page: str) -> str:
    """The Python blocks of a page on the lines where they are; "" if there is none."""
    lines = [""] * (page.count("\n") + 1)
    for block in BLOCK.finditer(page):
        first, code = page.count("\n", 0, block.start(1)), block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n" if any(lines) else ""


def write_modules(root: Path, folder: Path) -> dict[str, str]:
    """Write the pages and programs of ``root`` as modules; returns the path below ``root`` of each module's name."""
    paths = {}
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    for path in (*pages, *sorted((root / "examples").glob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if code := text if path.suffix == ".py" else module_of(text):
            below = path.relative_to(root)
            name = re.sub(r"\W", "_", str(below)) + ".py"
            (folder / name).write_text(code, encoding="utf-8")
            paths[name] = str(below)
    return paths


def errors_of(root: Path = ROOT) -> list[str]:
    """The errors that mypy and pyright find, one line each, with the paths of the pages."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = write_modules(root, folder)
        matches = [re.match(r".*?(\w+\.py)(:\d.*)", line) for line in (*_mypy(folder), *_pyright(folder))]
    # mypy follows imports, and also checks the library, with the options for examples: those errors do not count.
    return [paths[match[1]] + match[2] for match in matches if match and match[1] in paths]


def _mypy(folder: Path) -> list[str]:
    modules = map(str, sorted(folder.glob("*.py")))
    return [line for line in _run([*MYPY, *modules]) if ": error:" in line]


def _pyright(folder: Path) -> list[str]:
    options = {"include": ["."], "pythonVersion": "3.11", "extraPaths": SOURCES, **PYRIGHT}
    (folder / "pyrightconfig.json").write_text(json.dumps(options), encoding="utf-8")
    output = _run(["basedpyright", "-p", str(folder), "--pythonpath", sys.executable])
    return [line.strip() for line in output if " - error" in line]


def _run(command: list[str]) -> list[str]:
    process = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, encoding="utf-8", check=False, cwd=ROOT
    )
    if process.returncode not in (0, 1):
        raise SystemExit(f"{command[0]} failed: {process.stderr or process.stdout}")
    return process.stdout.splitlines()


def main() -> int:
    """Print the errors; returns 1 if there are any."""
    errors = errors_of()
    print(*errors, f"{len(errors)} errors in the examples", sep="\n")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
