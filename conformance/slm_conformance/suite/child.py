"""The subprocess of scenarios, ``python -m slm_conformance.suite.child ARGUMENTS``, and the call that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slm_conformance.suite.spec import make_backend
from slm_core.types import ContextOptions, KvType, Logits, ModelOptions, Pos

_LIMIT_S = 120
_STAYS_OPEN: list[object] = []
"""Objects of the subprocess that nothing closes before its interpreter ends."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process that decoded tokens in one batch, and ended with an open context.

    Attributes:
        status: its exit status.
        error: the last line that it wrote to standard error.
        output: the size of the logits in bytes, a newline, the logits after each token, float32, and the dump of the
            sequence.
    """

    status: int
    error: str
    output: bytes

    @property
    def logits(self) -> Logits:
        """The logits after each token, float32, [n * V]."""
        return np.frombuffer(self._parts()[0], np.float32)

    @property
    def dump(self) -> bytes:
        """The dump of the sequence."""
        return self._parts()[1]

    def check_status(self) -> None:
        """Fail if the process crashed, or ended with an error."""
        assert self.status == 0, f"another process ended with status {self.status}: {self.error}"

    def _parts(self) -> tuple[bytes, bytes]:
        if not self.output:
            self.check_status()
        size, _, rest = self.output.partition(b"\n")
        return rest[: int(size)], rest[int(size) :]


def run(arguments: Mapping[str, object]) -> OtherProcess:
    """Run ``main`` in another process."""
    process = subprocess.run(  # noqa: S603  (this interpreter, our own code)
        [sys.executable, "-m", "slm_conformance.suite.child", json.dumps(arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
        timeout=_LIMIT_S,
    )
    error = process.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return OtherProcess(process.returncode, error, process.stdout)


def main(arguments: str) -> None:
    """Decode tokens in one batch, write the logits and a dump to standard output, and return without closing anything.

    Args:
        arguments: backend, isolated, path, device, n_threads, load_options, kv_type and tokens, as JSON.
    """
    settings = json.loads(arguments)
    options = ModelOptions(settings["device"], settings["n_threads"], backend_options=settings["load_options"])
    backend = make_backend(settings["backend"], isolated=settings["isolated"])
    model = backend.load(Path(settings["path"]), options)
    kv_type = KvType(settings["kv_type"])
    context = model.new_context(ContextOptions(256, 4, 64, kv_type, kv_type))
    _STAYS_OPEN.append(context)
    batch = context.new_batch()
    batch.extend(settings["tokens"], Pos(0, 0), logits="all")
    logits = context.decode(batch).tobytes()
    sys.stdout.buffer.write(b"%d\n" % len(logits) + logits + context.dump(0))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
