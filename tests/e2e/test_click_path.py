"""From a first visit to rollback: the real command, a real Chromium, and a run that the product made."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.click_path import Walk, ask, stable_server
from tests.e2e.look import look
from tests.e2e.product import Product

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]
MINUTES = 2.0
MAKE_STRANGER = (
    "from polymorph_web.accounts.models import *;"
    "u = User.objects.create_user('stranger'); o = Organisation.objects.create(name='Other', slug='other');"
    "Membership.objects.create(user=u, organisation=o, role='admin')"
)


def test_the_whole_click_path(page: Page, product: Product, browser: Browser) -> None:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    walk = Walk(page, product, look)
    walk.sign_in()
    walk.open_endpoint()
    walk.try_it("baseline")
    assert ask(product).headers["x-polymorph-version"] == "baseline"
    served = stable_server(product)

    run = walk.optimise(MINUTES)
    walk.watch()
    walk.read_report()
    walk.read_winner()
    rollout = walk.approve("Measured faster on held-out traffic, every check passed.")
    walk.promote()

    # the running endpoint answers from the new forward pass, and nothing was restarted
    assert ask(product).headers["x-polymorph-version"] == "v1"
    now = stable_server(product)
    assert (now["pid"], now["host_pid"]) == (served["pid"], served["host_pid"])
    assert now["artifact_hash"] != served["artifact_hash"]
    page.get_by_role("link", name="Try it").click()
    walk.try_it("v1")

    walk.roll_back("To see that it works.")
    assert ask(product).headers["x-polymorph-version"] == "baseline"
    assert stable_server(product)["host_pid"] == served["host_pid"]
    walk.audit()
    assert not problems

    a_stranger_finds_nothing(browser, product, [run, f"{run}report/", rollout, f"{product.url}/e/demo/"])


def a_stranger_finds_nothing(browser: Browser, product: Product, addresses: list[str]) -> None:
    product.manage("shell", "-v0", "-c", MAKE_STRANGER)
    page = browser.new_page()
    page.goto(product.manage("signin_link", "stranger", "--base", product.url))
    page.get_by_role("button", name="Sign in").click()
    for address in addresses:
        answer = page.goto(address)
        assert answer is not None and answer.status == 404, address
    page.close()


def test_no_secret_is_written_to_a_log(product: Product) -> None:
    """The link's token, the gateway's token and the prompts of clients."""
    secrets = [product.link.rstrip("/").rsplit("/", 1)[1], (product.data / "gateway.token").read_text().strip()]
    secrets.append("The capital of France")
    for log in [*Path(product.data / "logs").glob("*.log"), *Path(product.data / "records").glob("*.jsonl")]:
        text = log.read_text()
        assert not [secret for secret in secrets if secret in text], log
