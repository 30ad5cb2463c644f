"""Writes docs/architectures.md from the results of the tests that compare each family with other engines.

python -m pytest tests/native/architectures -o junit_family=xunit1 --junitxml=results.xml
python tools/architectures_page.py results.xml docs/architectures.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

ENGINES = ("transformers", "llama.cpp")
OWN = "the rwkv package"  # of one family, in the notes
HEAD = """# Architectures

The families that the native engine runs, each with tiny random weights against two other engines: a prefill of 200
tokens that crosses every window, then 40 decoded one by one, then all again in chunks, on every tier. An error is the
largest of any row of logits, as the L2 norm of the difference in relation to that of the row, on the worst tier.
The bound is 1e-4; where llama.cpp looks GELU up in a table of half-precision numbers, it is 1e-3 against llama.cpp.
Encoders have no logits, and nothing to decode: of those the hidden states of 200 tokens are compared, and the table of
GELU counts for each layer.

`python -m pytest tests/native/architectures -o junit_family=xunit1 --junitxml=results.xml` and
`python tools/architectures_page.py results.xml docs/architectures.md` make this page.

A family is a kind of file; several may have one architecture. Layers with a window keep all positions and mask what the
window has passed, so they can be edited like any other; with `swa_full=False` they
[keep their window only](backends/native.md#sliding-window-layers). Edit levels are the native engine's (see
[the contract](contract.md)); models with learned positions can forget a tail, but not a span in the middle.

Layers with a state (convolutions, state spaces) remember a sequence in as many bytes however long it is. A context
keeps the current state of each sequence and six earlier ones, about as far apart as they lie behind. A tail is
forgotten, and a part forked, by decoding again from the nearest of them; nothing can be cut out. `slm info` shows the
bytes for each sequence, and those that attention layers take for each token.

A plugin adds an architecture by the hook `slm_architectures`: an entry with the name that files have, and a function
that turns a file's metadata (`slm_core.architectures.Keys`) into a `ModelSpec`. What the function does not read is
refused, and so are tensors that it does not declare; tensors that change nothing are reported in the log.
"""


def main(results: list[Path], page: Path) -> None:
    rows: dict[str, dict[str, str]] = {}
    for case in (case for path in results for case in ElementTree.parse(path).iter("testcase")):
        found = {prop.get("name"): prop.get("value") for prop in case.iter("property")}
        if "family" not in found:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{case.get('name')} failed: no page of failures")
        row = rows.setdefault(found["family"], found)
        for engine in (*ENGINES, OWN):
            if engine in found:
                row[engine] = str(max(float(row[engine]), float(found[engine])))
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
    own = [f"{float(row[OWN]):.0e} beside {OWN}, its reference implementation"] if OWN in row else []
    cells = [
        f"`{row['family']}`",
        f"`{row['architecture']}`",
        *errors,
        row["edit level"],
        "; ".join([row["note"], *own]),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:-1]], Path(sys.argv[-1]))
