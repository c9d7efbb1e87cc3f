"""The whole click path in a real Chromium, as a person walks it: every step is a click, what is read is on the page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from playwright.sync_api import Browser, Page, Playwright, expect

from tests.e2e.product import Product

RUN_LIMIT_MS = 420_000
STEP_MS = 60_000
SEARCHES = 3
ROLLOUT_MS = 180_000
Shot = Callable[[Page, str], None]


def chromium(playwright: Playwright) -> Browser:
    """The system's Chromium, or the one that playwright installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@dataclass
class Walk:
    """One person's way through the product. `shot` is called on every page, once it shows what it is there for."""

    page: Page
    product: Product
    shot: Shot = lambda page, name: None

    def sign_in(self) -> None:
        self.page.goto(self.product.link)
        self.shot(self.page, "sign-in-link")
        self.click("button", "Sign in")
        expect(self.page.get_by_role("heading", name="Fleet", level=1)).to_be_visible()
        self.shot(self.page, "fleet")

    def open_endpoint(self) -> None:
        self.page.get_by_role("link", name="SmolLM2-135M-Instruct (demo)").first.click()
        expect(self.page.get_by_role("heading", level=1)).to_contain_text("SmolLM2")
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """The engine server starts beside the pages; a person reloads until it serves."""
        for _ in range(60):
            if self.page.locator("h1").get_by_text("Serving").count():
                return
            self.page.wait_for_timeout(1000)
            self.page.reload()
        raise AssertionError(f"the endpoint does not serve: {self.page.locator('h1').inner_text()}")

    def try_it(self, version: str) -> str:
        """Asks the running endpoint. Returns its answer, which says that `version` gave it."""
        self.page.get_by_role("button", name="Send").click()
        expect(self.page.locator("[data-fact=version]")).to_have_text(version, timeout=STEP_MS)
        expect(self.page.get_by_role("button", name="Send")).to_be_enabled(timeout=STEP_MS)
        answer = self.page.locator("#try-answer").inner_text()
        assert len(answer) > 20, answer
        self.shot(self.page, f"endpoint-{version}")
        return answer

    def optimise(self, minutes: float) -> str:
        """Starts a run. Returns its address."""
        self.page.get_by_role("link", name="Optimise").first.click()
        self.page.get_by_label("Budget").fill(f"{minutes:g}")
        self.shot(self.page, "optimise")
        self.click("button", "Start optimising")
        expect(self.page.locator("#phases")).to_be_visible()
        return self.page.url

    def watch(self) -> None:
        """Waits for candidates, reloads in the middle, waits for the end."""
        rows = self.page.locator("#cand-body tr")
        expect(rows.first).to_be_visible(timeout=RUN_LIMIT_MS)
        known = rows.first.inner_text()
        self.shot(self.page, "run-live")
        self.page.reload()
        expect(self.page.locator("#cand-body")).to_contain_text(known.split("\n")[0].split("\t")[0])
        expect(self.page.locator("#pill")).to_have_attribute("data-state", "live", timeout=STEP_MS)
        ended = self.page.get_by_role("link", name="See before and after")
        for _ in range(SEARCHES):
            again = self.page.get_by_role("button", name="Search again")  # on a busy machine no gain may be sure
            expect(ended.or_(again).first).to_be_visible(timeout=RUN_LIMIT_MS)
            if ended.is_visible():
                break
            again.click()
        expect(ended).to_be_visible()
        self.shot(self.page, "run-ended")

    def read_report(self) -> None:
        self.page.get_by_role("link", name="See before and after").click()
        expect(self.page.locator("h1.claim")).to_contain_text(re.compile(r"\d\.\d+\s*[x×]"))
        expect(self.page.locator(".js-plotly-plot").first).to_be_visible(timeout=STEP_MS)
        fills = self.page.locator(".js-plotly-plot .js-fill").evaluate_all("all => all.map(e => +e.style.fillOpacity)")
        assert fills and max(fills) < 0.5, f"a band hides what lies under it: {fills}"
        self.shot(self.page, "before-after")

    def read_winner(self) -> None:
        """The winner's source as a diff."""
        report = self.page.url
        self.page.locator(".claim-sub a").first.click()
        expect(self.page.locator("#diff")).to_contain_text("forward.py")
        self.shot(self.page, "candidate")
        self.page.goto(report)

    def approve(self, reason: str) -> str:
        """Approves the result. Returns the rollout's address."""
        self.page.get_by_role("link", name=re.compile("decide|approve", re.I)).first.click()
        self.click("button", "Approve")
        expect(self.page.get_by_text("This field is required").first).to_be_visible()  # a reason is asked for
        self.page.get_by_label("Reason").fill(reason)
        self.shot(self.page, "approve")
        self.click("button", "Approve")
        expect(self.page.locator("#rollout-panel")).to_be_visible()
        return self.page.url

    def promote(self) -> None:
        """Waits for the canary's soak, then promotes."""
        button = self.page.locator("#act-promote")
        expect(button).to_be_enabled(timeout=ROLLOUT_MS)
        self.shot(self.page, "rollout-ready")
        button.click()
        expect(self.page.get_by_text("answers every request").first).to_be_visible(timeout=ROLLOUT_MS)
        self.shot(self.page, "rollout-done")

    def roll_back(self, reason: str) -> None:
        self.page.get_by_role("link", name="Roll back").first.click()
        self.page.get_by_label("Reason").fill(reason)
        self.shot(self.page, "roll-back")
        self.click("button", "Roll back now")
        expect(self.page.get_by_text("baseline answers every request").first).to_be_visible(timeout=ROLLOUT_MS)

    def audit(self) -> None:
        self.page.get_by_role("link", name="Audit").first.click()
        expect(self.page.locator("table")).to_contain_text("run.start")
        self.shot(self.page, "audit")

    def click(self, role: str, name: str) -> None:
        self.page.get_by_role(role, name=name, exact=True).click()  # type: ignore[arg-type]


def ask(product: Product, tokens: int = 16) -> httpx.Response:
    """One request of a client, through the gateway."""
    body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0}
    response = httpx.post(f"{product.gateway}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def stable_server(product: Product) -> dict[str, object]:
    """What the gateway says of the server that answers."""
    token = (product.data / "gateway.token").read_text().strip()
    url = f"{product.gateway}/admin/endpoints/demo/plan"
    answer = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=10).json()
    return next(s for s in answer["servers"] if s["role"] == "stable")
