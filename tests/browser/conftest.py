"""Tests here open pages in Chromium, driven by Playwright: they run with --require-browser, and fail where one of them is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path("/usr/bin/chromium")  # Debian's package: Playwright downloads none
# Nothing in the background: a machine without a network would refuse it, many times.
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic"),
)


@pytest.fixture(scope="module")  # while it is there an event loop runs in this thread, which other tests may want for themselves
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """One Chromium for the tests of a file."""
    missing = None if CHROMIUM.is_file() else f"needs {CHROMIUM}: apt install chromium"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        missing = f"needs Playwright: pip install playwright; {error}"
    if missing:
        pytest.fail(missing)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield chromium
        chromium.close()


class Watched:
    """A page, and what it must not do: ask for something that is no file, or complain."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)

    def require_quiet(self) -> None:
        """Fails if it did."""
        assert [url for url in self.requests if not re.match(r"file:|data:", url)] == []
        assert self.complaints == []


@pytest.fixture
def watched(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A new page; `parametrize` it indirectly with options of a browser's context. What it did is judged in the end."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **getattr(request, "param", {})})
    page = Watched(context.new_page())
    yield page
    page.require_quiet()
    context.close()
