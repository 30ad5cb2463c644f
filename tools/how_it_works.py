"""Writes the parts of docs/how-it-works.md that come from the code: the steps of the demo model, the shapes of a batch,
the code of two steps, and the picture.

python tools/how_it_works.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

import slm_core as slm
from slm_core.gguf import GgufFile
from slm_core.types import ContextOptions, Pos
from slm_native.kernels.reference import ReferenceKernels
from slm_native.model import NativeModel
from slm_native.steps import FfnStep, SelfAttention

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = Path("docs/how-it-works.md"), Path("docs/images/forward.svg")
TEXT = "The sun rises in the"
TRACED = {
    "embed": "look the tokens up in the embedding matrix",
    "project": "normalize, multiply by several matrices",
    "store": "normalize keys per head, rotate them (RoPE), write keys and values into the KV cache",
    "heads": "normalize queries per head, rotate them (RoPE)",
    "attention_over_runs": "attend to the KV cache",
    "add_product": "multiply by the output matrix, add to the residual stream",
    "gate_up": "normalize, multiply by gate and up, SwiGLU",
}
LOGITS = "normalize, multiply by the output matrix: the logits of the last token"


class TracingKernels(ReferenceKernels):
    """The reference tier, recording the shapes of its operations' inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, str]] = []
        self._depth = 0

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        return self._recording(name, attribute) if name in TRACED else attribute

    def _recording(self, name: str, operation: Any) -> Any:
        def recorded(*args: Any, **named: Any) -> Any:
            self._depth += 1
            try:
                result = operation(*args, **named)
            finally:
                self._depth -= 1
            if self._depth == 0:
                inputs = [arg for arg in args if isinstance(arg, np.ndarray)]
                outputs = [] if result is None else [result] if isinstance(result, np.ndarray) else list(result)
                self.calls.append((name, _shapes(inputs), _shapes(outputs)))
            return result

        return recorded


def _shapes(arrays: Iterable[Any]) -> str:
    return ", ".join("[" + ", ".join(map(str, array.shape)) + "]" for array in arrays)


def trace() -> tuple[int, list[tuple[str, str, str]]]:
    """The tokens of ``TEXT``, and the operations of a pass through embedding, first layer and output matrix."""
    kernels = TracingKernels()
    model = NativeModel(GgufFile.open(slm.demo_model_path()), kernels, lambda share: None)
    with model.new_context(ContextOptions(n_ctx=64)) as context:
        tokens = model.vocab.encode(TEXT, add_special=True, parse_special=False)
        batch = context.new_batch()
        batch.extend(tokens, Pos(0, 0), logits="last")
        kernels.calls.clear()
        context.decode(batch)
    model.close()
    projections = [i for i, call in enumerate(kernels.calls) if call[0] == "project"]
    return len(tokens), [*kernels.calls[: projections[1]], kernels.calls[-1]]


def steps(tier: str) -> list[str]:
    """The demo model's steps on a tier."""
    with slm.load(slm.demo_model_path(), backend="native", tier=tier) as model:
        return list(model.model.steps)  # type: ignore[attr-defined]


def table() -> str:
    """The operations as a table of shapes."""
    n_tokens, calls = trace()
    rows = [f"| operation | takes | gives | what it does with the {n_tokens} tokens |", "|---|---|---|---|"]
    for i, (name, inputs, outputs) in enumerate(calls):
        description = (
            "normalize, multiply by the output matrix: the logits of the last token"
            if i + 1 == len(calls)
            else TRACED[name]
        )
        rows.append(f"| `{name}` | {inputs} | {outputs or '-'} | {description} |")
    return "\n".join(rows)


def code(function: Any) -> str:
    """A function's source without its docstring, as a block of the page."""
    lines = re.sub(r'\n +"""[^"]*"""', "", textwrap.dedent(inspect.getsource(function)), count=1)
    return f"```py\n{lines}```"


def picture() -> str:
    """The steps of the demo model from top to bottom: as they are lowered, and as the cpu tier runs them."""
    box, gap, width, left = 26, 8, 560, 20
    lowered = ["embedding", *steps("reference"), "norm, output matrix", "sampler"]
    parts, n_lowered = [], len(lowered)
    height = n_lowered * (box + gap) + 44
    parts.append(f'<text x="{left}" y="24">one step after another (reference, torch)</text>')
    parts.append(f'<text x="{left + width + 40}" y="24">the cpu tier</text>')
    for i, text in enumerate(lowered):
        y = 40 + i * (box + gap)
        kind = "step" if 0 < i < n_lowered - 2 else "end"
        parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{width}" height="{box}" rx="4"/>')
        parts.append(f'<text x="{left + 10}" y="{y + 18}">{escape(text)}</text>')
    top, bottom = 40 + box + gap, 40 + (n_lowered - 2) * (box + gap) - gap
    calls = steps("cpu")
    call_height = (bottom - top - gap * (len(calls) - 1)) / len(calls)
    for i, call in enumerate(calls):
        y, n_steps = top + i * (call_height + gap), call.count(";") + 1
        parts.append(
            f'<rect class="call" x="{left + width + 40}" y="{y:g}" width="180" height="{call_height:g}" rx="4"/>'
        )
        parts.append(f'<text x="{left + width + 50}" y="{y + call_height / 2 + 5:g}">one call: {n_steps} steps</text>')
    style = (
        "text{font:13px monospace;fill:#222}rect{stroke:#555;fill:#eef3fb}.end{fill:#f3f3f3}.call{fill:#fdf0dc}"
        "svg{background:#fff}"
    )
    size = f'width="{width + 240}" height="{height}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>\n{body}\n</svg>\n'


def page(text: str) -> str:
    """The page with its parts generated again."""
    parts = {
        "steps": "```text\n" + "\n".join(steps("reference")[:4]) + "\n...\n```",
        "shapes": table(),
        "attention": code(SelfAttention.mix),
        "feed-forward": code(FfnStep.add),
    }
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, marker, rest = text.partition(begin)
        assert marker and end in rest, f"the page has no part {name}"
        text = before + begin + part + "\n" + end + rest.partition(end)[2]
    return text


def main(root: Path = ROOT) -> None:
    """Write both files below ``root``."""
    (root / PAGE).write_text(page((root / PAGE).read_text()))
    (root / PICTURE).write_text(picture())


if __name__ == "__main__":
    main()
