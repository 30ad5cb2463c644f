"""Draw the JSON file of `growth.py`: a picture for each part, docs/images/growth-PART.svg.

    pip install matplotlib; python benchmarks/growth_pictures.py benchmarks/results/growth-DATE.json [--out docs/images]

The background is transparent, and all colors are readable on white and on black.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

GREY = "#808080"
COLORS = ("#2f81f7", "#d9730d", "#2da44e", "#a371f7")
MARKERS = ("o", "s", "^", "D")
X_LABELS = {"sequences": "sequences", "contexts": "tokens in the context", "models": "parameters"}
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "growth",  # the same numbers give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), GREY
    ),
}


def in_words(n: float) -> str:
    """512, 4k, 135M, 1.7B."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:.2g}{unit}" if n < 10 * size else f"{n / size:.0f}{unit}"
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def draw_curve(axes: Any, curve: dict[str, Any], points: dict[str, float]) -> None:
    """Medians of each engine, and the range of its rounds."""
    for i, (engine, found) in enumerate(curve["found"].items()):
        measured = [(n, values) for n, values in zip(points.values(), found, strict=True) if values]
        if not measured:
            continue
        xs, samples = zip(*sorted(measured), strict=True)
        color = COLORS[i % len(COLORS)]
        medians = [statistics.median(values) for values in samples]
        axes.plot(xs, medians, color=color, marker=MARKERS[i % len(MARKERS)], markersize=4, label=engine)
        axes.fill_between(xs, [min(v) for v in samples], [max(v) for v in samples], color=color, alpha=0.2, linewidth=0)
    axes.set_title(f"{curve['name']} ({curve['unit']}{', lower is better' if curve['lower'] else ''})", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(points.values()), [in_words(n) for n in points.values()], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def draw(part: dict[str, Any], path: Path) -> None:
    """One row of diagrams, one for each curve."""
    n = len(part["curves"])
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(1, n, figsize=(max(5, 3.6 * n), 3.4), squeeze=False, layout="constrained")
        for axes, curve in zip(rows[0], part["curves"], strict=True):
            draw_curve(axes, curve, part["points"])
            axes.set_xlabel(X_LABELS[part["part"]])
        rows[0][0].legend(frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=Path, help="the JSON file of growth.py")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    for part in json.loads(options.numbers.read_text())["parts"]:
        path = options.out / f"growth-{part['part']}.svg"
        draw(part, path)
        print(path)


if __name__ == "__main__":
    main()
