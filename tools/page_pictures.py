"""Draws docs/images/page.png and page-prompt.png: the page of ``slm serve`` in Debian's Chromium.

``python -m tools.page_pictures`` has a chat with the demo model, and forgets a message of it.
"""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

import slm_core as slm
from slm_core.server import EngineSettings, ServedModel, create_app
from tests.browser import CHROMIUM, press, say
from tests.http_server import serving

PICTURES = Path(__file__).parents[1] / "docs" / "images"
LINES = (
    "My dog is called Rex.",
    "I live in Rome, near the river, in a small house with a green door, two old cats and a garden.",
    "What is my dog called?",
    "What is 12 + 30?",
)


def main() -> None:
    """Write the pictures."""
    demo = ServedModel(
        "demo", lambda: slm.load(slm.demo_model_path()), settings=EngineSettings(n_ctx=1024, reuse="cut")
    )
    with serving(create_app([demo], log=None)) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 760})
        page.goto(url)
        _chat(page)
        page.screenshot(path=PICTURES / "page.png")
        page.get_by_role("button", name="Prompt").click()
        expect(page.get_by_role("dialog")).to_be_visible()
        page.screenshot(path=PICTURES / "page-prompt.png")
        browser.close()


def _chat(page: Page) -> None:
    page.get_by_label("Temperature").fill("0")
    for line in LINES[:3]:
        say(page, line)
    press(page, 2, "Forget")
    say(page, LINES[3])
    press(page, 6, "Tokens")
    page.locator(".chance").nth(2).hover()


if __name__ == "__main__":
    main()
