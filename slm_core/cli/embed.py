"""``slm embed``: prints embeddings of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slm_core.cli import options as o
from slm_core.cli.adapters import AdapterOptions
from slm_core.cli.files import read_stdin
from slm_core.cli.terminal import print_json
from slm_core.types import Pooling


def _pooling_names(incomplete: str) -> list[str]:
    return [name for name in Pooling if name.startswith(incomplete)]


def read_texts(texts: list[str]) -> list[str]:
    """The texts of the command line; the lines of standard input for "-".

    Raises:
        typer.BadParameter: there are other texts in addition to "-".
    """
    if "-" not in texts:
        return texts
    if len(texts) > 1:
        raise typer.BadParameter('give texts, or "-" alone', param_hint="TEXT")
    return read_stdin().splitlines()


@o.expand_groups
def embed(
    *,
    path: Annotated[Path, typer.Argument(metavar="MODEL", help=f"{o.A_MODEL}.")],
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help='The texts; "-" reads them from standard input, one a line.')
    ],
    engine: o.EngineOptions,
    adapter_options: AdapterOptions,
    pooling: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"How tokens become one vector: {', '.join(Pooling)} (default: as the file says).",
            autocompletion=_pooling_names,
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Normalize vectors to length 1.")] = True,
) -> None:
    """Print the embeddings of texts as a JSON object."""
    texts = read_texts(texts)
    with engine.load(path) as model:
        embeddings = model.embed(texts, pooling=pooling, normalize=normalize, adapters=adapter_options.load(model))
    rows = zip(texts, embeddings.n_tokens, embeddings.vectors.tolist(), strict=True)
    print_json(
        {
            "pooling": embeddings.pooling,
            "normalized": normalize,
            "embeddings": [{"text": text, "tokens": n_tokens, "vector": vector} for text, n_tokens, vector in rows],
        }
    )
