"""Runs a program line by line: a failure is shown as a script of these lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.programs.context_programs import Mismatch
from slm_conformance.suite.tolerance import relative_errors
from slm_conformance.suite.workshop import Rows
from slm_core.errors import SlmError
from slm_core.protocols import Context

Errors: TypeAlias = set[type[Exception]]

_IMPORTS = (
    "from contextlib import suppress",
    "from pathlib import Path",
    "from slm_conformance.oracle.factories import make_tiny_model",
    "from slm_conformance.suite.spec import make_backend",
    "from slm_core.errors import *",
    "from slm_core.types import ContextOptions, KvType, ModelOptions",
)


class Script:
    """Lines of Python, run as they are added.

    Args:
        bench: the bench of the model under test.
        opening: the lines that load the same model outside of the suite.
        imports: further lines; they are run.
    """

    def __init__(self, bench: Bench, opening: str, imports: Sequence[str]) -> None:
        self._bench = bench
        self._lines = [*_IMPORTS, *imports, *opening.splitlines()]
        self.names: dict[str, Any] = {"model": bench.model}
        exec("\n".join(imports), self.names)  # noqa: S102  (imports of our own)

    def context(self, n_ctx: int, n_seq_max: int, n_batch: int) -> Context:
        """An empty context, named ``context``."""
        context = self._bench.context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        kv = f"KvType({self._bench.kv_type.value!r})"
        self._lines.append(f"context = model.new_context(ContextOptions({n_ctx}, {n_seq_max}, {n_batch}, {kv}, {kv}))")
        self.names["context"] = context
        return context

    def run(self, line: str, errors: Errors | None = None, *, must: bool = False) -> bool:
        """Run a line; returns whether it succeeded.

        Args:
            line: the line to run.
            errors: the errors that it may raise.
            must: whether it must raise one of these.

        Raises:
            Mismatch: it raised another error, or did not raise a required one.
        """
        errors = errors or set()
        expected = " or ".join(sorted(error.__name__ for error in errors))
        try:
            exec(line, self.names)  # noqa: S102  (the lines are made by the suite)
        except Exception as error:
            if not isinstance(error, tuple(errors)):
                kind = "" if isinstance(error, SlmError) else ", which is none of slm_core.errors"
                self.fail(line, f"it raised {type(error).__name__} ({error}){kind}; expected: {expected or 'no error'}")
            self._lines.append(f"with suppress({type(error).__name__}):\n    {line}")
            return False
        if errors and must:
            self.fail(line, f"it was accepted; expected: {expected}")
        self._lines.append(line)
        return True

    def check(self, holds: bool, line: str, why: str) -> None:
        """Fail with ``assert line`` unless it holds."""
        if not holds:
            self.fail(f"assert {line}", why)

    def check_row(self, name: str, expected: Rows) -> None:
        """Compare a row of logits, float32 [V], with the reference's."""
        row = self.names[name]
        error, allowed = relative_errors(row[None], expected[None])[0], self._bench.tolerance.row
        k = int(np.argmax(np.abs(row - expected)))
        line = f"abs({name}[{k}] - {expected[k]:.6g}) < {abs(row[k] - expected[k]) / 2:.2g}"
        why = f"logits differ from the reference by {error:.1e} of their norm, allowed {allowed:.1e}"
        self.check(bool(error <= allowed), f"{line}  # by the float64 reference", why)

    def fail(self, line: str, why: str) -> NoReturn:
        """Show the script, which goes wrong in its last line.

        Raises:
            Mismatch: always.
        """
        script = "\n".join([*self._lines, line])
        raise Mismatch(f"a program goes wrong in its last line: {why}\n\n{script}\n")
