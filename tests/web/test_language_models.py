"""Language-model agents on the pages: offered only where they are configured, and what they took is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from optimizer.config import RunConfig
from optimizer.export.finish import FINISHER
from optimizer.ledger import Ledger
from optimizer.report import Facts, build_report
from polymorph_web.accounts.models import User
from polymorph_web.audit.models import Entry
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.operations.supervisor import LLM_KEY, Program, Supervisor, own_environment
from polymorph_web.runs.models import Run
from polymorph_web.runs.store import DjangoRunStore
from tests.web import runs

As = Callable[[str], Client]
FORM = {"budget_minutes": "5", "tolerance": "near", "foci": ["attention"], "seed": "3"}
OFFER = {"model": "scripted-1", "host": "models.example", "max_usd": 2.0}
USED = {
    "agent": "ada", "model": "scripted-<1>", "usd": 0.0123, "calls": 7, "input_tokens": 12345, "cached_tokens": 6000,
    "output_tokens": 890, "estimated_calls": 0, "failures": {"rate_limit": 2, "malformed": 1}, "reserved": None,
}  # fmt: skip


@pytest.fixture
def offered(settings: Any) -> None:
    settings.LLM_OFFER = OFFER


def shown(client: Client) -> str:
    return client.get("/e/chat/optimise/").content.decode()


def test_nothing_is_offered_where_no_model_is_configured(endpoint: Endpoint, as_: As, settings: Any) -> None:
    settings.LLM_OFFER = None
    assert "Language-model agents" not in shown(as_("member"))
    as_("member").post("/e/chat/optimise/", FORM | {"llm": "on", "llm_max_usd": "1"})
    assert Run.objects.get().config["llm"] == {}, "who forges the field gets no model either"


def test_a_configured_model_is_offered_with_a_cap_and_is_off(endpoint: Endpoint, as_: As, offered: None) -> None:
    page = shown(as_("member"))
    assert "Language-model agents" in page and "scripted-1 at models.example" in page and "at most $2.00" in page
    assert 'name="llm" id="id_llm" checked' not in page
    as_("member").post("/e/chat/optimise/", FORM | {"llm_max_usd": "2"})
    assert Run.objects.get().config["llm"] == {}


def test_what_was_allowed_is_what_the_worker_reads(endpoint: Endpoint, as_: As, offered: None) -> None:
    as_("member").post("/e/chat/optimise/", FORM | {"llm": "on", "llm_max_usd": "0.5"})
    config = Run.objects.get().config
    assert config["llm"] == {"model": "scripted-1", "max_usd": 0.5}
    assert RunConfig.from_json(config).llm == config["llm"]
    assert Entry.objects.get(action="run.start").after["llm"] == config["llm"]


@pytest.mark.parametrize(
    ("cap", "said"),
    [("", "Say what the language model may cost"), ("9", "less than or equal to 2"), ("0", "greater than or equal to 0.01"),
     ("nan", "Enter a number")],
)  # fmt: skip
def test_a_wrong_cap_is_said_beside_its_field(endpoint: Endpoint, as_: As, offered: None, cap: str, said: str) -> None:
    response = as_("member").post("/e/chat/optimise/", FORM | {"llm": "on", "llm_max_usd": cap})
    assert response.status_code == 200 and said in response.content.decode()
    assert not Run.objects.exists()


def test_a_runs_page_shows_what_its_models_took(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.queued_run(endpoint, people["member"])
    runs.searched(run)[0].llm_usage(USED)
    page = as_("viewer").get(reverse("run", args=[run.id])).content.decode()
    card = page[page.index('id="llm-card"') : page.index('id="checks-card"')]
    assert "hidden" not in card.split(">")[0]
    for text in ("ada", "scripted-&lt;1&gt;", "12,345", "6,000", "890", "$0.012", "1 malformed, 2 rate limit"):
        assert text in card, text
    assert '<td class="num">3</td><td class="num">1</td>' in card, "proposals and kept are of its agent"


def test_a_run_without_models_has_no_such_card(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.queued_run(endpoint, people["member"])
    runs.searched(run)
    page = as_("viewer").get(reverse("run", args=[run.id])).content.decode()
    assert "hidden" in page[page.index('id="llm-card"') :].split(">")[0]


@pytest.mark.parametrize("cleaned", [False, True])
def test_a_winner_that_a_model_wrote_is_said_to_be_one(
    endpoint: Endpoint, people: dict[str, User], cleaned: bool
) -> None:
    run = runs.queued_run(endpoint, people["member"])
    ledger, winner, baseline = runs.searched(run)
    ledger.llm_usage(USED)
    if cleaned:  # as it goes on after the search
        digest = winner.candidate.artifact_hash
        winner = replace(winner, candidate=replace(winner.candidate, agent=FINISHER, parent=digest))
    report = build_report(ledger.config, ledger, Facts({}, {}, {}, baseline.hash), winner, "It was faster.")
    assert [line for line in report["limits"] if "written by the language model scripted-<1>" in line]
    assert [row["llm"]["calls"] for row in report["agents"] if row["agent"] == "ada"] == [7]


def test_totals_are_known_to_the_next_attempt(endpoint: Endpoint, people: dict[str, User]) -> None:
    run = runs.queued_run(endpoint, people["member"])
    runs.searched(run)[0].llm_usage(USED)
    Run.objects.filter(id=run.id).update(lease_expires=0)
    store = DjangoRunStore()
    lease = store.claim(str(run.id), "another worker", 60)
    assert lease is not None and lease.attempt == 2
    assert Ledger(RunConfig.from_json(run.config), store, lease).usage == {"ada": USED}


def test_the_key_reaches_the_worker_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LLM_KEY, "sk-secret")
    supervisor = Supervisor(tmp_path / "logs", own_environment(tmp_path, {}), tmp_path)
    show = [sys.executable, "-c", f"import os; print(os.environ.get({LLM_KEY!r}))"]
    programs = (Program("gateway", show), Program("worker", show, secrets=(LLM_KEY,)))
    for program in programs:
        supervisor.start(program)
        supervisor.running[program.name].process.wait(30)
    assert [supervisor.log(p.name).read_text().strip() for p in programs] == ["None", "sk-secret"]
