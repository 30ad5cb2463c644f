"""Writes docs/architectures.md from the results of the tests that compare each family with other engines.

python -m pytest tests/native/architectures -o junit_family=xunit1 --junitxml=results.xml
python tools/architectures_page.py results.xml docs/architectures.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

ENGINES = ("transformers", "llama.cpp")
REFERENCE_PACKAGE = "the rwkv package"  # of one family, shown in the notes
HEAD = """# Architectures

The native engine runs the families of the [table](#families). `slm info` names the backends that can run your file:

```sh
slm info model.gguf
```

A family is a kind of model file; several families may have one architecture. Edit levels (see
[the contract](contract.md)) are the levels of the native engine:

- Sliding-window layers store all positions and mask positions outside the window, so these models have all edits. With
  `swa_full=False` they [store only their window](backends/native.md#sliding-window-layers).
- Models with learned positions have truncate, but no cut.
- Recurrent layers (convolutions, state spaces) have no cuts. Their state has the same size for every length of a
  sequence. A context keeps the current state of each sequence, and six earlier states at growing distances. A truncate,
  or a fork of a part of a sequence, decodes again from the nearest state. `slm info` shows the bytes per sequence of
  recurrent layers, and the bytes per token of attention layers.

A plugin adds an architecture with the hook `slm_architectures`: an entry with the architecture's name in files, and a
function that turns a file's metadata (`slm_core.architectures.Keys`) into a `ModelSpec`. A metadata key that the
function does not read, and a tensor that the `ModelSpec` does not declare, are errors. Tensors without effect are
reported in the log.

## Families

The tests compare each family, with tiny random weights, with two other engines on every tier: a prefill of 200 tokens,
which is longer than every window, then 40 single tokens, then all tokens again in chunks. The table shows the largest
error of a row of logits (L2 norm of the difference over the L2 norm of the row) on the worst tier. The bound is 1e-4.
Against llama.cpp it is 1e-3 for families whose GELU llama.cpp reads from a table of half-precision numbers. Encoders
have no logits, so the tests compare the hidden states of 200 tokens, with the bound for GELU after each layer.

These commands make the page:

```sh
python -m pytest tests/native/architectures -o junit_family=xunit1 --junitxml=results.xml
python tools/architectures_page.py results.xml docs/architectures.md
```
"""


def main(results: list[Path], page: Path) -> None:
    rows: dict[str, dict[str, str]] = {}
    for case in (case for path in results for case in ElementTree.parse(path).iter("testcase")):
        properties = {prop.get("name"): prop.get("value") for prop in case.iter("property")}
        if "family" not in properties:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{case.get('name')} failed: no page of failures")
        row = rows.setdefault(properties["family"], properties)
        for engine in (*ENGINES, REFERENCE_PACKAGE):
            if engine in properties:
                row[engine] = str(max(float(row[engine]), float(properties[engine])))
    if not rows:
        raise SystemExit("no results of families (usage: architectures_page.py RESULTS.xml... PAGE.md)")
    lines = [
        HEAD,
        "| family | architecture | transformers | llama.cpp | edit level | notes |",
        "|---|---|---|---|---|---|",
    ]
    page.write_text("\n".join([*lines, *(_line(rows[family]) for family in sorted(rows))]) + "\n")


def _line(row: dict[str, str]) -> str:
    errors = [f"{float(row[engine]):.0e}" if engine in row else "" for engine in ENGINES]
    reference = []
    if REFERENCE_PACKAGE in row:
        error = f"{float(row[REFERENCE_PACKAGE]):.0e}"
        reference.append(f"{error} compared with {REFERENCE_PACKAGE}, its reference implementation")
    cells = [
        f"`{row['family']}`",
        f"`{row['architecture']}`",
        *errors,
        row["edit level"],
        "; ".join([row["note"], *reference]),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:-1]], Path(sys.argv[-1]))
