"""``slm serve`` behind the flags of llama-server, for llama.cpp's tests of it.

    python -m tools.clients.llama_server_shim --port 8080 [flags of llama-server]

It serves the demo model, whatever model the flags name. OpenAI's paths also work without "/v1", as at llama-server.
Flags that only change speed or memory are ignored. Other flags without a meaning here are ignored, too: tests that
need them fail.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn

import slm_core as slm
from slm_core.server import EngineSettings, ServedModel, ServerOptions, create_app

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OTHER_NAMES = ("davinci-002", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "test", "text-embedding-3-small")
"""Names of models in requests of the tests; llama-server accepts every name."""
WITHOUT_VERSION = ("/chat/completions", "/models", "/rerank", "/responses")


class Shim:
    """An ASGI application that changes requests for llama-server to those for ``slm serve``.

    Args:
        app: the application of ``slm serve``.
        reasons: whether the model reasons; None for the template's default.
    """

    def __init__(self, app: Any, reasons: bool | None) -> None:
        self._app = app
        self._reasons = reasons

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in WITHOUT_VERSION:
            scope = {**scope, "path": f"/v1{scope['path']}"}
        if self._reasons is not None and scope["method"] == "POST":
            scope, receive = await self._with_reasoning(scope, receive)
        await self._app(scope, receive, send)

    async def _with_reasoning(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """The request, with the flag as a variable of the template."""
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
        body = json.loads(data)
        body["chat_template_kwargs"] = {"enable_thinking": self._reasons, **body.get("chat_template_kwargs", {})}
        data = json.dumps(body).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        sent = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def again() -> MutableMapping[str, Any]:
            return next(sent, None) or await receive()

        return {**scope, "headers": [*headers, (b"content-length", str(len(data)).encode())]}, again


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("port", "host", "alias", "ctx-size", "api-key", "chat-template", "chat-template-file", "reasoning"):
        parser.add_argument(f"--{name}")
    flags, _ = parser.parse_known_args(arguments)
    template = flags.chat_template
    if flags.chat_template_file is not None:
        template = Path(flags.chat_template_file).read_text(encoding="utf-8")
    named = template is not None and "{" not in template

    def load() -> slm.Model:
        if named:
            return slm.load(slm.demo_model_path(), backend="native", formatter=template)
        return slm.load(slm.demo_model_path(), backend="native", chat_template=template)

    first, *others = (flags.alias or "demo").split(",")
    aliases = tuple(name for name in (*others, *OTHER_NAMES) if name != first)
    served = ServedModel(first, load, aliases=aliases, settings=EngineSettings(n_ctx=int(flags.ctx_size or 2048)))
    keys = (flags.api_key,) if flags.api_key else ()
    app = create_app([served], ServerOptions(keys=keys))
    reasons = {"on": True, "off": False}.get(flags.reasoning)
    host = flags.host.split(",")[0] if flags.host else "127.0.0.1"
    uvicorn.run(Shim(app, reasons), host=host, port=int(flags.port), log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1:])
