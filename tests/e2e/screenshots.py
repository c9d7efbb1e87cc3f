"""`make screenshots`: every page of the click path, light and dark, wide and narrow, to docs/screenshots."""

from __future__ import annotations

import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.e2e.click_path import Walk, chromium
from tests.e2e.product import ROOT, running_product

OUT = ROOT / "docs" / "screenshots"
SIZES = {"wide": (1440, 900), "narrow": (360, 780)}
THEMES = ("light", "dark")
KEPT = {("before-after", "wide", "light"), ("run-ended", "wide", "dark")}  # what the documents show
KEPT_HEIGHT = 1500  # the top of the page is enough for a document
MINUTES = 5.0
OTHERS = {
    "register": "/endpoints/new/",
    "performance": "/e/demo/?tab=performance",
    "versions": "/e/demo/?tab=versions",
    "runs": "/e/demo/?tab=runs",
    "activity": "/e/demo/?tab=activity",
    "support": "/support/",
    "not-found": "/e/nothing/",
}


def shot(folder: Path) -> object:
    """A function that takes a page in every size and theme and leaves it as it was."""

    def take(page: Page, name: str) -> None:
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            for size, (width, height) in SIZES.items():
                page.set_viewport_size({"width": width, "height": height})
                page.wait_for_timeout(400)  # figures follow the width on the next frame
                kept = (name, size, theme) in KEPT
                path = (OUT if kept else folder) / f"{name}-{size}-{theme}.png"
                clip = {"x": 0, "y": 0, "width": width, "height": KEPT_HEIGHT} if kept else None
                page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1440, "height": 900})

    return take


def main() -> None:
    folder = ROOT / "build" / "screenshots"
    for path in (folder, OUT):
        path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data, running_product(Path(data)) as product, sync_playwright() as playwright:
        page = chromium(playwright).new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(30_000)
        walk = Walk(page, product, shot(folder))  # type: ignore[arg-type]
        walk.sign_in()
        walk.open_endpoint()
        walk.try_it("baseline")
        walk.optimise(MINUTES)
        walk.watch()
        walk.read_report()
        walk.read_winner()
        walk.approve("Measured faster on held-out traffic, every check passed.")
        walk.promote()
        page.get_by_role("link", name="Try it").click()
        walk.try_it("v1")
        walk.roll_back("To see that it works.")
        walk.audit()
        for name, address in OTHERS.items():
            page.goto(product.url + address)
            walk.shot(page, name)
    print(f"written to {folder} and {OUT}")


if __name__ == "__main__":
    main()
