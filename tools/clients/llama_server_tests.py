"""The tests that llama.cpp brings for llama-server, against ``slm serve``.

``llama_server_tests.txt`` lists the tests that are run; each has to pass. They check the form of answers, streams and
errors. The other tests need things that this server lacks or does in another way: numbers of the model stories260K,
llama.cpp's own paths (/completion, /props, /slots), images, routing to other servers, and web pages of any origin.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tools.clients.places import BUILD, environment, source

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
NAMES = Path(__file__).with_suffix(".txt")
_NEEDED = (
    *(
        "pytest>=8.3,<9",
        "pytest-timeout",
        "pytest-xdist",
        "aiohttp",
        "filelock",
        "numpy",
        "openai",
        "prometheus-client",
    ),
    *("requests", "wget"),
)
_WITHOUT_DOWNLOADS = """
import utils

utils.ServerPreset.load_all = staticmethod(lambda: None)
"""


def check(_: str) -> str:
    """Run the tests, which start servers of their own.

    Raises:
        AssertionError: a test does not pass.
    """
    python = environment("llama-server-tests", _NEEDED)
    folder = source(PACKAGE, VERSION, python) / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    command = [python, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-p", "without_downloads", "-q", "-rA"]
    plugins = BUILD / "llama-server-plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "without_downloads.py").write_text(_WITHOUT_DOWNLOADS)
    done = subprocess.run(
        [*command, "--tb=no", "--timeout=60", f"@{NAMES}"],
        cwd=folder,
        env={**os.environ, "LLAMA_SERVER_BIN_PATH": str(_program()), "PYTHONPATH": f"{plugins}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    passed = set(re.findall(r"^PASSED (.+)$", done.stdout, re.MULTILINE))
    failed = [name for name in NAMES.read_text().splitlines() if name not in passed]
    assert not failed, f"these tests do not pass: {', '.join(failed)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return f"{PACKAGE} {VERSION}: {len(passed)} tests of llama-server passed"


def _program() -> Path:
    """A program that takes the flags of llama-server."""
    program, root = BUILD / "llama-server", Path(__file__).parents[2]
    command = shlex.join([sys.executable, "-m", "tools.clients.llama_server_shim"])
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(root))} exec {command} "$@"\n')
    program.chmod(0o755)
    return program
