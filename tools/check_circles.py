"""Finds modules that import each other in a circle. Imports for type checking do not count: they never run."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter

import grimp

PACKAGES = ("slm_core", "slm_native", "slm_llamacpp", "slm_onnx", "slm_formatters", "slm_conformance")


def main() -> int:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        print("modules import each other in a circle:", " <- ".join(error.args[1]), file=sys.stderr)
        return 1
    print(f"{len(imports)} modules, no circle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
