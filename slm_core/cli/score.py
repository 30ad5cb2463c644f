"""``slm score``: measures the perplexity of a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from slm_core.cli import options as o
from slm_core.cli.adapters import AdapterOptions
from slm_core.cli.files import read_stdin, read_text
from slm_core.cli.terminal import out, print_json, write


@o.expand_groups
def score(
    *,
    names: Annotated[
        list[str],
        typer.Argument(metavar="[MODEL] FILE", help='The default is the demo model; "-" reads standard input.'),
    ],
    engine: o.EngineOptions,
    adapter_options: AdapterOptions,
    ctx: o.ContextSize = None,
    kv_type: o.KvTypeFlag = None,
    as_json: o.AsJson = False,
) -> None:
    """Measure how well a model predicts a text: perplexity, and bits per byte."""
    if len(names) > 2:
        raise typer.BadParameter("give one file of text, and before it a model, if any", param_hint="FILE")
    text = read_stdin(errors="replace") if names[-1] == "-" else read_text(Path(names[-1]), errors="replace")
    kv_types = o.read_kv_types(kv_type)
    with engine.load(Path(names[0]) if len(names) == 2 else None) as model:
        adapters = adapter_options.load(model)
        scored = model.score(text, n_ctx=o.context_size(model, ctx), adapters=adapters, **kv_types)
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    bits = -scored.total / math.log(2) / n_bytes if scored.n_scored else math.nan
    if as_json:
        values = {"perplexity": scored.perplexity, "bits_per_byte": bits}
        finite_values = {name: value if math.isfinite(value) else None for name, value in values.items()}
        print_json({**finite_values, "logprob": scored.total, "tokens": scored.n_scored, "bytes": n_bytes})
        return
    write(out(), f"perplexity {scored.perplexity:.4f}, {bits:.4f} bits a byte, of {scored.n_scored} tokens\n")
