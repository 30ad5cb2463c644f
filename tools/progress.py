"""Runs a long command behind one line of progress: ``python tools/progress.py LABEL -- COMMAND...``.

On a terminal the line is updated twice a second; in a pipe a new line follows every 30 seconds. The line shows the
label, the time, and how far a compilation is, as ninja prints it: ``[34/120]``. The command's output is shown only if
the command fails, and the exit code is the command's. It needs the standard library alone.
"""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

REFRESH_S = 0.5
PIPE_EVERY_S = 30.0
N_SHOWN = 40
_STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")


class Output:
    """The end of a command's output, and the last step of a compilation in it."""

    def __init__(self) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=N_SHOWN)
        self.step = ""

    def read(self, pipe: IO[str]) -> None:
        """Read to the end."""
        for line in pipe:
            self.lines.append(line)
            if found := _STEP.match(line):
                self.step = f", compiled {found[1]} of {found[2]}"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    if len(arguments) < 3 or arguments[1] != "--":
        sys.stderr.write("usage: progress.py LABEL -- COMMAND...\n")
        return 2
    return run(arguments[0], arguments[2:])


def run(label: str, command: Sequence[str]) -> int:
    """Run a command behind a line of progress; returns its exit code."""
    began, output = time.monotonic(), Output()
    on_terminal = sys.stdout.isatty()

    def line() -> str:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        return f"{minutes}:{seconds:02d}{output.step}  {label}"

    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None, "the output is a pipe"
        reader = threading.Thread(target=output.read, args=(process.stdout,), daemon=True)
        reader.start()
        _show(line() if on_terminal else f"{label} ...", on_terminal)
        while reader.is_alive():
            reader.join(REFRESH_S if on_terminal else PIPE_EVERY_S)
            if reader.is_alive():
                _show(line(), on_terminal)
    failed = process.returncode != 0
    _show(f"{line()}: {'failed' if failed else 'done'}", on_terminal)
    if on_terminal:
        sys.stdout.write("\n")
    if failed:
        sys.stdout.writelines(output.lines)
    return process.returncode


def _show(line: str, on_terminal: bool) -> None:
    if on_terminal:
        sys.stdout.write("\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1])
    else:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
