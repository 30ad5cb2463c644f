"""Runs other people's clients against ``slm serve`` with the demo model.

    python -m tools.clients [NAME ...]

Each client gets an environment of its own in build/clients, from PyPI or the npm registry. A program in programs/ uses
it as its users would. The clients of OpenAI and Anthropic bring tests in their source distributions, and llama.cpp has
tests of its server; they are run, too (``own_tests.py``, ``llama_server_tests.py``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tools.clients import llama_server_tests
from tools.clients.own_tests import ANTHROPIC, MODELS, OPENAI, OwnTests, check
from tools.clients.places import BUILD, environment

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = {
    "ollama_client": ("ollama",),
    "openai_agents": ("openai-agents",),
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]",),
    "instructor_client": ("instructor",),
    "openresponses": ("openresponses-types",),
    "lm_eval_client": ("lm-eval[api]",),
}
"""Programs, and what they need from PyPI."""
NODE = {
    "openai_client": ("openai", "zod"),
    "ai_sdk": ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
}
"""Programs, and what they need from the npm registry."""
OWN_TESTS: dict[str, OwnTests] = {"openai-tests": OPENAI, "anthropic-tests": ANTHROPIC}


def main(names: Sequence[str]) -> int:
    """Run the clients with these names, or all; the number of those that failed."""
    checks: dict[str, Callable[[str], str]] = {
        **{name: partial(_python, name, needed) for name, needed in PYTHON.items()},
        **{name: partial(_node, name, needed) for name, needed in NODE.items()},
        **{name: partial(check, tests) for name, tests in OWN_TESTS.items()},
        "llama-server-tests": llama_server_tests.check,
    }
    unknown = [name for name in names if name not in checks]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)} (there are: {', '.join(checks)})")
    n_failed = 0
    with serving() as url:
        for name in names or checks:
            try:
                result = checks[name](url)
            except subprocess.CalledProcessError as error:
                n_failed += 1
                result = f"FAILED\n{error.output}"
            except AssertionError as error:
                n_failed += 1
                result = f"FAILED: {error}"
            print(f"{name}: {result}", flush=True)
    return n_failed


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server with the demo model under the names that tests of clients use."""
    aliases = [part for name in MODELS for part in ("--alias", f"{name}=demo")]
    command = [sys.executable, "-c", "from slm_core.cli import main; main()", "serve", "demo=", "--port", "0", *aliases]
    log = BUILD / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file, subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                address = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
                if address is not None:
                    break
                if process.poll() is not None:
                    raise SystemExit(f"slm serve ended: {log.read_text()}")
                time.sleep(0.1)
            else:
                raise SystemExit("slm serve was not ready within a minute")
            yield address[0]
        finally:
            process.terminate()


def _python(name: str, needed: Sequence[str], url: str) -> str:
    python = environment(name, needed)
    _run([python, "-P", PROGRAMS / f"{name}.py"], url)
    package = needed[0].partition("[")[0]
    ask = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    return f"{package} {version}: passed"


def _node(name: str, needed: Sequence[str], url: str) -> str:
    if shutil.which("npm") is None:
        raise AssertionError("there is no npm")
    folder = BUILD / f"node-{name}"
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        subprocess.run(["npm", "install", "--silent", *needed], cwd=folder, check=True)
    shutil.copy(PROGRAMS / f"{name}.mjs", folder)
    _run(["node", f"{name}.mjs"], url, folder)
    listed = subprocess.run(["npm", "list", needed[0]], cwd=folder, capture_output=True, text=True, check=True).stdout
    (installed,) = re.findall(rf"{re.escape(needed[0])}@\S+", listed)
    return f"{installed}: passed"


def _run(command: Sequence[object], url: str, folder: Path | None = None) -> None:
    subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "SERVER_URL": url, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=300,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
