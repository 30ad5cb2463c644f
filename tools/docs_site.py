"""Hooks of mkdocs: pages from outside docs/, notebooks as pages, and the API reference from ``slm_core.__all__``."""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site that are files outside docs/."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
SECTIONS = {
    "loading": "Loading",
    "chat": "Chats and sessions",
    "generation": "Answers and events",
    "engine": "Many requests",
    "sampling": "Sampling",
    "embedding": "Embeddings",
    "types": "Values",
    "errors": "Errors",
}
"""Modules of slm_core, and the title of what they define; other modules are at the end."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and remove the files of notebooks, which have pages instead."""
    from mkdocs.structure.files import File

    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=notebook_page(notebook)))
        files.remove(next(file for file in files if file.src_uri == f"notebooks/{notebook.name}"))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site; a link to a file that is not on the site becomes its text."""
    source = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    known = {file.src_uri for file in files}

    def linked(match: re.Match[str]) -> str:
        return relinked(match, source, page.file.src_uri, known)

    parts = FENCED.split(markdown)
    return "".join(part if i % 2 else LINK.sub(linked, part) for i, part in enumerate(parts))


def relinked(match: re.Match[str], source: str, page: str, known: set[str]) -> str:
    """A link of the file ``source`` as a link of ``page``."""
    image, text, target = match.groups()
    if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.startswith("#"):
        return match.group()
    path, _, anchor = target.partition("#")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    of_file = {outside: page for page, outside in OUTSIDE.items()}
    on_site = of_file.get(file, file.removeprefix("docs/") if file.startswith("docs/") else "")
    on_site = re.sub(r"^(notebooks/\w+)\.ipynb$", r"\1.md", on_site)
    if on_site not in known:
        return text if (ROOT / file).exists() else match.group()  # mkdocs warns of a link that leads nowhere
    where = posixpath.relpath(on_site, posixpath.dirname(page) or ".")
    return f"{image}[{text}]({where}{'#' + anchor if anchor else ''})"


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its cells, and their outputs as stored."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return "".join(data["text/html"]).replace("\n", "&#10;")  # one line: Markdown leaves a block of HTML as it is
    return "```text\n" + "".join(data.get("text/plain") or output.get("text", "")).rstrip("\n") + "\n```"


def public_names() -> dict[str, list[str]]:
    """The public names of slm_core, by section."""
    sys.path.insert(0, str(ROOT))
    import slm_core

    sections: dict[str, list[str]] = {title: [] for title in (*SECTIONS.values(), "Extending")}
    for name in slm_core.__all__:
        module = getattr(getattr(slm_core, name), "__module__", "slm_core.types").split(".")
        sections[SECTIONS.get(module[1] if len(module) > 1 else "", "Extending")].append(name)
    return sections


def api_page() -> str:
    """The API reference, made from docstrings."""
    parts = ["# API reference\n\nEverything in `slm_core`: `import slm_core as slm`."]
    for title, names in public_names().items():
        if names:
            parts += [f"## {title}", *(f"::: slm_core.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"
