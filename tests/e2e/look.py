"""What holds on every page."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page


def look(page: Page, name: str) -> None:
    """Nothing lies outside a phone's width, and axe finds nothing."""
    page.set_viewport_size({"width": 360, "height": 780})
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size({"width": 1440, "height": 900})
    assert width <= 360, f"{name} is {width} px wide on a phone"
    found = Axe().run(page).response["violations"]
    assert not found, f"{name}: " + "; ".join(f"{v['help']}: {v['nodes'][0]['html'][:200]}" for v in found)
