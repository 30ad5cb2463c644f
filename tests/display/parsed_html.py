"""HTML for notebooks, read by the standard library's parser."""

from __future__ import annotations

from html.parser import HTMLParser

TAGS = {"div", "span", "table", "tr", "td"}
ATTRIBUTES = {"style", "title", "class"}


class Parsed(HTMLParser):
    """Elements with their attributes, and the text, in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.foreign: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> does not close the last element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.foreign.append(data)

    def handle_decl(self, decl: str) -> None:
        self.foreign.append(decl)

    def unknown_decl(self, data: str) -> None:
        self.foreign.append(data)

    def handle_pi(self, data: str) -> None:
        self.foreign.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def titles(self) -> list[str]:
        return [value or "" for _, attributes in self.elements for name, value in attributes if name == "title"]


def checked(html: str) -> Parsed:
    """The parsed HTML; only allowed elements and attributes, all closed, no script and no address in a style."""
    parsed = Parsed(html)
    assert parsed.open == [], f"not closed: {parsed.open}"
    assert parsed.foreign == []
    for tag, attributes in parsed.elements:
        assert tag in TAGS, f"<{tag}>"
        assert {name for name, _ in attributes} <= ATTRIBUTES, attributes
        for name, value in attributes:
            assert name != "style" or not any(bad in (value or "") for bad in ("url", "expression", "/", "<", "@"))
    html.encode()
    return parsed
