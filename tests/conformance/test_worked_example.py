"""The backend of docs/backends.md, assembled from the blocks of the page, passes the suite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "backends.md"
BLOCK = re.compile(r"^```python\n# (my_\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN = (
    "import slm_conformance, sys;"
    " sys.exit(slm_conformance.run('my_backend:MyBackend', extra_args=['-q', '-rs', '--slm-quick']))"
)


def write_modules(folder: Path) -> set[str]:
    """Write the modules from the page's code blocks, and return their names."""
    sources: dict[str, str] = {}
    for name, source in BLOCK.findall(PAGE.read_text()):
        sources[name] = sources.get(name, "") + source + "\n\n"
    for name, source in sources.items():
        (folder / name).write_text(source)
    return set(sources)


def test_the_worked_example_passes_the_suite(tmp_path, monkeypatch):
    assert write_modules(tmp_path) == {"my_backend.py", "my_plugin.py"}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert re.match(r"\d{3,} passed", summary), summary
    absent = {feature for feature in re.findall(r"declared absent: (.*)", done.stdout) if "does not run" not in feature}
    optional = {"device_sampling", "embedding_input", "embeddings", "bidirectional_blocks", "mrope_positions"}
    assert absent == {*optional, "adapters", "attention_bias", "mtp", "layer_states"}, (
        "the example declares everything else"
    )


def test_the_worked_plugin_names_the_backend(tmp_path, monkeypatch):
    write_modules(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    code = (
        "import my_plugin; from slm_core.plugins import Registry; "
        "print(Registry({'mine': my_plugin}).statuses()[0].name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "mine"
