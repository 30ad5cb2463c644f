"""``slm rerank``: ranks texts by a query."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slm_core.cli import options as o
from slm_core.cli.adapters import AdapterOptions
from slm_core.cli.embed import read_texts
from slm_core.cli.terminal import out, print_json, write


@o.expand_groups
def rerank(
    *,
    path: Annotated[Path, typer.Argument(metavar="MODEL", help=f"A reranker: {o.A_MODEL}.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the texts should answer.")],
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help='The texts; "-" reads them from standard input, one a line.')
    ],
    engine: o.EngineOptions,
    adapter_options: AdapterOptions,
    top: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the best N.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Rank texts by how well they answer a query, best first, with a reranker."""
    texts = read_texts(texts)
    with engine.load(path) as model:
        ranking = model.rerank(query, texts, adapters=adapter_options.load(model))
    best = ranking.order[:top]
    if as_json:
        print_json([{"index": i, "score": float(ranking.scores[i]), "text": texts[i]} for i in best])
        return
    for i in best:
        write(out(), f"{ranking.scores[i]:8.4f}", "dim")
        write(out(), f"  {texts[i]}\n")
