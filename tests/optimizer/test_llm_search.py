"""A whole search on the tiny model with a scripted language model: its program is measured, its failure is a dead end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kernels.build import has_compiler
from optimizer import trials
from optimizer.agents import make_agents
from optimizer.config import RunConfig
from optimizer.file_store import FileStore, worker_name
from optimizer.ledger import last_told
from optimizer.records import MEASURED, State
from optimizer.report import print_report
from optimizer.search import Search
from tests.optimizer.agents.llm_programs import FUSED, KERNEL, WRONG
from tests.optimizer.agents.llm_server import KEY, Fails, Says, Scripted, answer, llm_server
from tests.optimizer.scripted import SMALL, data_folder

ENVIRONMENT = {"API_KEY": KEY, "USD_PER_M_INPUT": "2", "USD_PER_M_CACHED": "0.5", "USD_PER_M_OUTPUT": "10"}
NOTHING = Says("I have no more ideas.")


class Ended:
    def __init__(self, tiny_model: Path, data: Path, server: Scripted) -> None:
        llm = {"model": "scripted-1", "base_url": server.url, "max_usd": 0.5}
        self.config = RunConfig(
            str(tiny_model), SMALL.to_json(), str(data), dtype="float32", threads=1, budget_s=40, llm=llm
        )
        self.store, self.server, self.data = FileStore(data), server, data
        self.store.create(self.config.run_id, self.config.to_json())
        lease = self.store.claim(self.config.run_id, worker_name(), 60)
        assert lease
        agents = [a for a in make_agents(0, (), llm) if a.name.startswith("llm")]
        self.report = Search(self.config, self.store, agents=agents).run(lease)
        self.state = self.store.load(self.config.run_id)
        self.events = self.store.events(self.config.run_id, limit=100_000)


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    script = (Says(WRONG), Fails(500), Says(answer()), Says(FUSED), Says(KERNEL), NOTHING)
    with pytest.MonkeyPatch.context() as patch, llm_server(*script) as server:
        for name, value in ENVIRONMENT.items():
            patch.setenv(f"POLYMORPH_LLM_{name}", value)
        patch.setattr(trials, "TIER_ONE_LIMIT_S", 3.0)
        yield Ended(tiny_model, data_folder(tmp_path_factory.mktemp("llm")), server)


@pytest.mark.parametrize(("name", "mechanism"), [("fused qkv", "python"), ("silu kernel", "cpp")])
def test_a_models_program_is_measured(ended: Ended, name: str, mechanism: str) -> None:
    if mechanism == "cpp" and not has_compiler():
        pytest.skip("no C++ compiler")
    (candidate,) = (c for c in ended.state.candidates if c.name == f"llm-1: {name}")
    found = [e for e in ended.state.experiments if e.artifact_hash == candidate.artifact_hash]
    assert found and found[0].state in MEASURED and found[0].checks_passed
    assert (candidate.agent, candidate.mechanism) == ("llm-1", mechanism) and "one" in candidate.hypothesis.lower()


def test_its_failure_is_a_dead_end_that_a_later_prompt_holds(ended: Ended) -> None:
    (wrong,) = (c for c in ended.state.candidates if c.name == "llm-1: rolled logits")
    (experiment,) = (e for e in ended.state.experiments if e.artifact_hash == wrong.artifact_hash)
    assert experiment.state is State.FAILED and "wrong values" in experiment.failure
    (post,) = (p for p in ended.state.posts if p.kind == "dead_end" and p.artifact_hash == wrong.artifact_hash)
    later = [
        body["messages"][1]["content"]
        for body in ended.server.asked
        if "wrong values" in body["messages"][1]["content"]
    ]
    assert later and "## Dead ends" in later[0] and " ".join(post.text.split())[:60] in later[0]


def test_tokens_and_money_are_in_the_report(ended: Ended) -> None:
    assert ended.report is not None
    (row,) = (r for r in ended.report["agents"] if r["agent"] == "llm-1")
    calls = len(ended.server.asked) - 1  # one of them failed with status 500
    measured = 1 + has_compiler()
    assert (row["proposals"], row["failed"], row["measured"]) == (1 + measured, 1, measured)
    assert (row["llm"]["model"], row["llm"]["calls"]) == ("scripted-1", calls)
    assert row["llm"]["input_tokens"] == 1000 * calls and row["llm"]["cached_tokens"] == 600 * calls
    assert row["llm"]["usd"] == pytest.approx(calls * (400 * 2 + 600 * 0.5 + 200 * 10) / 1e6)
    assert row["llm"]["failures"]["server"] == 1 and row["llm"]["failures"]["malformed"] > 1
    console = Console(record=True, width=400)
    print_report(ended.report, console)
    assert "scripted-1" in (text := console.export_text()) and f"{1000 * calls:,}" in text


def test_the_key_is_nowhere_in_what_is_kept(ended: Ended) -> None:
    kept = [json.dumps(ended.report), json.dumps(ended.events), json.dumps(ended.config.to_json())]
    kept += [p.read_bytes().decode(errors="replace") for p in ended.data.rglob("*") if p.is_file()]
    assert ended.server.keys[0] == f"Bearer {KEY}" and not any(KEY in text for text in kept)


def test_a_resumed_run_knows_what_was_used(ended: Ended) -> None:
    assert ended.report is not None
    (row,) = (r for r in ended.report["agents"] if r["agent"] == "llm-1")
    assert last_told(ended.store, ended.config.run_id)[0] == {"llm-1": {"agent": "llm-1"} | row["llm"]}
