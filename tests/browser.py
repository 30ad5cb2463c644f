"""The page of ``slm serve`` in Chromium."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from playwright.sync_api import Page, expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of a server."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        (socket,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def say(page: Page, text: str) -> None:
    """Send a message, and wait for its answer."""
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")
    answered(page)


def answered(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Again")).to_be_visible()


def press(page: Page, number: int, name: str) -> None:
    """Press a button of a message."""
    page.locator("article").nth(number).get_by_role("button", name=name, exact=True).click()
