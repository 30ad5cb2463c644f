"""The page of ``slm serve`` in Chromium."""

from __future__ import annotations

import shutil

from playwright.sync_api import Page, expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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
