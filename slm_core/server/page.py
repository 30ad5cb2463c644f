"""The page at /: chats in a browser. One file, which loads nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()
_HTML = (resources.files(__package__) / "page.html").read_bytes()


def _policy(html: bytes) -> str:
    """A content security policy with which only this page's style and script work, and only this server is called.

    No text can become a script: neither as an element or attribute, nor by assignment (trusted types).
    """

    def digest(tag: bytes) -> str:
        (content,) = re.findall(b"<%b(?: [^>]*)?>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest(b'script')}; style-src {digest(b'style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )


_HEADERS = {
    "content-security-policy": _policy(_HTML),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> Response:
    """The page. Ollama's clients ask for its head to see whether the server answers."""
    return Response(_HTML, media_type="text/html", headers=_HEADERS)
