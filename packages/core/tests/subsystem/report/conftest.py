"""A real browser without access to a network."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, ViewportSize, sync_playwright

from assay.report.page.html import publish_one
from assay.report.run_report import read_report
from packages.core.tests.subsystem.report.opened_pages import FAULTY
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

REQUIRED = "ASSAY_REQUIRE_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",  # as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class OpenedPage:
    """An opened page, its console messages and its requests."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Chromium:
    """Opens pages from disk."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> OpenedPage:
        """The page at `path`, in a window of `width`."""
        context = self._browser.new_context(
            viewport=ViewportSize(width=width, height=900),
            color_scheme="dark" if dark else "light",
            offline=True,
        )
        opened = OpenedPage(context.new_page())

        def tracer(route: Route) -> None:
            opened.requests.append(route.request.url)
            if route.request.url.startswith("file:"):
                route.continue_()
            else:
                route.abort()

        context.route("**/*", tracer)
        page = opened.page
        page.on("console", lambda message: opened.complaints.append(message.text))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("dialog", lambda dialog: opened.complaints.append(f"dialog {dialog.message}"))
        page.goto(path.as_uri())
        if page.locator("#data").count():
            page.wait_for_selector("html[data-drawn]")  # the script decompresses in the background
        return opened


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """A headless Chromium; without one a skip, or a failure where one is required."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        reason = f"no browser: none of {', '.join(NAMES)} is in PATH"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{reason}, and {REQUIRED}=1")
        pytest.skip(f"{reason} (set {REQUIRED}=1 to make this a failure)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield Chromium(browser)
        browser.close()


@pytest.fixture(scope="session")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with a fault in `FAULTY`."""
    folder = write_sample(tmp_path_factory.mktemp("failed"), Sample(faulty_module=FAULTY))
    return publish_one(read_report(folder))
