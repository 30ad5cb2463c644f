"""Checks the relative links and anchors of the project's Markdown files; prints the broken ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "tools/**/*.md", "benchmarks/**/*.md")

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    counts: dict[str, int] = {}
    slugs = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeats = counts.get(slug, 0)
        counts[slug] = repeats + 1
        slugs.add(f"{slug}-{repeats}" if repeats else slug)
    return slugs


def targets(text: str) -> list[str]:
    """The targets of a document's links, except in code."""
    prose = INLINE_CODE.sub("", FENCE.sub("", text))
    return [inline or reference for inline, reference in LINK.findall(prose)]


def problem(document: Path, target: str) -> str:
    """The problem of a link of ``document``, or ""."""
    if ELSEWHERE.match(target):
        return ""
    path, _, anchor = unquote(target).partition("#")
    linked = (document.parent / path).resolve() if path else document
    if not linked.exists():
        return "no such file"
    if anchor and (linked.suffix != ".md" or anchor not in anchors(linked.read_text(encoding="utf-8"))):
        return "no such heading"
    return ""


def main(root: Path = ROOT) -> int:
    """Check all documents; returns the number of broken links."""
    documents = sorted({path for pattern in PATTERNS for path in root.glob(pattern)})
    broken = 0
    for document in documents:
        for target in targets(document.read_text(encoding="utf-8")):
            if reason := problem(document, target):
                print(f"{document.relative_to(root)}: {target}: {reason}")
                broken += 1
    print(f"{len(documents)} documents, {broken} broken links")
    return broken


if __name__ == "__main__":
    sys.exit(main() > 0)
