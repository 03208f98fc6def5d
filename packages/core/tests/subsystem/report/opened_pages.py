"""Pages opened in a browser, and the values they show under the pointer."""

from pathlib import Path
from typing import Protocol

from playwright.sync_api import Page

FAULTY = "model.layers.2.mlp.down_proj"
MAX_BYTES = 7_000_000


class OpenedPage(Protocol):
    page: Page
    complaints: list[str]
    requests: list[str]


class Chromium(Protocol):
    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> OpenedPage: ...


def tip_at(page: Page, x: float, y: float) -> list[str]:
    page.mouse.move(x, y)
    return page.locator("#tip").inner_text().splitlines()


def middle_of(page: Page, selector: str) -> tuple[float, float]:
    found = page.locator(selector)
    found.scroll_into_view_if_needed()
    box = found.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
