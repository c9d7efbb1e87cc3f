"""The board of a run that goes on, in a real Chromium: read, filtered by keyboard, followed over the socket, on a phone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.click_path import Walk
from tests.e2e.look import look
from tests.e2e.product import Product

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
WORKER = """
from optimizer.records import Post
from optimizer.store import Lease
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import Run
from polymorph_web.runs.store import DjangoRunStore
from optimizer.config import RunConfig
from optimizer.ledger import Ledger
"""
BEGIN = """
from tests.web import runs
endpoint = Endpoint.objects.get()
ledger, _, _ = runs.searched(runs.queued_run(endpoint, endpoint.created_by))
for n in range(60):
    ledger.post(Post(f"n{n}", "fusion", "insight", f"number {n}"))
ledger.post(Post("q1", "attention", "question", "cache, has your best a joint layout?"))
print(ledger.config.run_id)
"""
GO_ON = """
run = Run.objects.get()
lease = Lease(str(run.id), run.lease_owner, run.attempt, run.lease_expires)
ledger = Ledger(RunConfig.from_json(run.config), DjangoRunStore(), lease)
"""


@pytest.fixture(scope="module")
def run(product: Product) -> str:
    """The address of a run that a worker of this test holds."""
    return f"{product.url}/runs/{product.manage('shell', '-v0', '-c', WORKER + BEGIN).splitlines()[-1]}/"


def says(product: Product, *posts: str) -> None:
    """The run's worker puts these posts on the board, from a process of its own."""
    product.manage("shell", "-v0", "-c", WORKER + GO_ON + "".join(f"ledger.post(Post({post}))\n" for post in posts))


def threads(page: Page) -> Locator:
    return page.locator("#board .thread")


def test_the_board_is_read_filtered_and_followed(page: Page, product: Product, run: str) -> None:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    Walk(page, product).sign_in()
    page.goto(run)
    expect(page.locator("#pill")).to_have_attribute("data-state", "live")
    expect(threads(page)).to_have_count(40)
    expect(threads(page).last).to_contain_text("has your best a joint layout?")

    page.get_by_role("button", name="Earlier posts").press("Enter")
    expect(threads(page)).to_have_count(62)
    expect(page.get_by_role("button", name="Earlier posts")).to_have_count(0)

    page.get_by_label("Kind of post").select_option("Asks")
    expect(threads(page)).to_have_count(1)
    expect(page).to_have_url(re.compile(r"\?kind=question$"))
    says(
        product,
        '"a1", "cache", "answer", "Yes, <i>joint_kv</i>.", reply_to="q1"',
        '"n99", "fusion", "insight", "not asked for"',
        '"q2", "llm-1", "question", "who tried int8?"',
    )
    expect(threads(page)).to_have_count(2)
    expect(threads(page).first).to_contain_text("Yes, <i>joint_kv</i>.")
    expect(page.get_by_label("Agent").locator("option")).to_contain_text(["All agents", "llm-1"])
    expect(page.locator("#board")).not_to_contain_text("not asked for")

    page.reload()
    expect(threads(page)).to_have_count(2)
    page.get_by_label("Words in a post").focus()
    page.keyboard.type("INT8")
    expect(threads(page)).to_have_count(1)
    expect(page).to_have_url(re.compile(r"\?kind=question&q=INT8$"))
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        look(page, f"the filtered board, {theme}")
    page.keyboard.type("x")
    expect(page.get_by_text("No post matches.")).to_be_visible()

    page.goto(f"{run}#post-n3")  # on an earlier page
    expect(page.locator("#post-n3")).to_be_in_viewport()
    says(product, '"r3", "cache", "result", "late, on an earlier page", reply_to="n2"')
    expect(threads(page).filter(has_text="late, on an earlier page")).to_contain_text("number 2")
    look(page, "the board")
    assert not problems
