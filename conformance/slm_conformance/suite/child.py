"""The subprocess of scenarios: ``python -m slm_conformance.suite.child TASK ARGUMENTS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slm_conformance.suite.spec import make_backend
from slm_core.protocols import Context
from slm_core.types import ContextOptions, KvType, Logits, ModelOptions, Pos


def main(task: str, arguments: str) -> None:
    """Make a context from ``arguments`` (JSON), decode their tokens, and run the task.

    Args:
        task: "dump" writes a dump of the sequence to standard output, "logits" the logits after each token, and both
            close the model; "exit" ends without closing anything.
        arguments: backend, isolated, path, device, n_threads, load_options, kv_type, tokens.
    """
    options_of_child = json.loads(arguments)
    options = ModelOptions(
        options_of_child["device"], options_of_child["n_threads"], backend_options=options_of_child["load_options"]
    )
    backend = make_backend(options_of_child["backend"], isolated=options_of_child["isolated"])
    model = backend.load(Path(options_of_child["path"]), options)
    kv_type = KvType(options_of_child["kv_type"])
    context = model.new_context(ContextOptions(256, 4, 64, kv_type, kv_type))
    logits = _feed(context, options_of_child["tokens"])
    if task != "exit":
        sys.stdout.buffer.write(context.dump(0) if task == "dump" else logits.tobytes())
        model.close()


def _feed(context: Context, tokens: list[int]) -> Logits:
    batch = context.new_batch()
    batch.extend(tokens, Pos(0, 0), logits="all")
    return context.decode(batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
