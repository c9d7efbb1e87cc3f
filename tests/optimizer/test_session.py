"""The search's decisions on a laboratory that answers by script: who is measured, who becomes the incumbent, what resumes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostFailure
from optimizer import search as search_module
from optimizer.agents.base import Desk, SearchView, Tried
from optimizer.config import RunConfig
from optimizer.cost.fitted import CostModel
from optimizer.cost.roofline import Workload
from optimizer.file_store import FileStore
from optimizer.lab import Scene
from optimizer.ledger import Cancelled, Ledger
from optimizer.measure.stats import paired_ratio
from optimizer.measure.tiers import Measured, TooFast, WrongValues
from optimizer.records import Estimate, Experiment, Post, Proposal, State
from optimizer.search import Search, SearchFailed
from optimizer.store import LeaseLost
from tests.optimizer.scripted import SMALL, Scripted, proposal, scene_of

PARTS = {"projections": 0.6, "attention": 0.3, "cache": 0.1}
STEP = {"decode": 1.0, "prefill": 1.0}


def answer(
    ratio: float, state: State, over: float | None = None, beats: State | None = None, behaviour: str = ""
) -> Measured:
    """At tier 1 `ratio` is over the incumbent; at tier 2 over the baseline, `over` and `beats` being of the incumbent."""
    rival = paired_ratio([over * 0.99, over, over * 1.01]) if over else None
    pairs = paired_ratio([ratio * 0.99, ratio, ratio * 1.01])
    return Measured(pairs, state, 0.1, 0.2, rival, beats=beats, behaviour=behaviour)


Answer = Measured | Exception
Script = dict[str, tuple[Answer, ...]]  # candidate -> answers of tier 1, tier 2


class ScriptedLab:
    """Stands in for the laboratory: no host, no clock."""

    script: Script = {}
    asked: list[tuple[int, str, str]] = []  # tier, candidate, incumbent
    resident: list[tuple[str, ...]] = []
    pooled: list[tuple[str, int]] = []  # candidate, pairs of earlier visits that it was given
    before_tier_two: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self, run: RunConfig, scene: Scene, ledger: Ledger, artifacts: ArtifactStore) -> None:
        self.run, self.scene, self.ledger, self.artifacts = run, scene, ledger, artifacts
        self.baseline = artifacts.baseline()
        self.work = Workload(2, 20, 8, 20, STEP, {phase: PARTS for phase in STEP})
        self.visits: dict[str, int] = {}
        floors = {phase: dict.fromkeys(PARTS, 0.0) for phase in STEP}
        self.cost = CostModel(self.work, floors)

    def open(self) -> None: ...
    def close(self) -> None: ...
    def measure_swaps(self, builder: Any, worked: Any) -> None: ...
    def time_steps(self, *hashes: str) -> None: ...

    def shares(self) -> dict[str, dict[str, float]]:
        return {phase: PARTS for phase in STEP}

    def tier_one(
        self,
        artifact: Artifact,
        incumbent: Artifact | None,
        timeout_s: float,
        earlier: Sequence[float] = (),
        judge: Callable[[str], None] = lambda behaviour: None,
    ) -> Measured:
        visit = self.visits[artifact.hash] = self.visits.get(artifact.hash, 0) + 1
        given = self.script[artifact.manifest.name][0]
        if isinstance(given, Measured) and given.behaviour:
            judge(given.behaviour)
        found = self._answer(1, artifact, incumbent)
        self.pooled.append((artifact.manifest.name, len(earlier)))
        answers = self.script[artifact.manifest.name]
        if visit > 1:  # what a later visit finds stands behind the answers of both tiers
            again = answers[visit]
            assert isinstance(again, Measured)
            found = again
        against = incumbent or self.baseline
        ratios = paired_ratio([*earlier, *found.ratio.ratios])
        return replace(found, against=against.hash, ratio=ratios)

    def tier_two(self, artifact: Artifact, incumbent: Artifact | None) -> Measured:
        self.before_tier_two(artifact.manifest.name)
        return self._answer(2, artifact, incumbent)

    def keep(self, *hashes: str) -> None:
        self.resident.append(tuple(self.artifacts.get(h).manifest.name for h in hashes))

    def _answer(self, tier: int, artifact: Artifact, incumbent: Artifact | None) -> Measured:
        name = artifact.manifest.name
        self.asked.append((tier, name, incumbent.manifest.name if incumbent else ""))
        given = self.script[name][tier - 1]
        if isinstance(given, Exception):
            raise given
        return given


class Harness:
    def __init__(self, folder: Path, model: Path) -> None:
        self.store = FileStore(folder)
        self.config = RunConfig(str(model), SMALL.to_json(), str(folder), dtype="float32", threads=1, budget_s=600)
        self.store.create(self.config.run_id, self.config.to_json())
        self.finalists: list[str] = []
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.attempts = 0

    def search(self, script: Script, agents: list[Scripted] | None = None) -> dict[str, Any] | None:
        """Another attempt at the run."""
        ScriptedLab.script, ScriptedLab.asked, ScriptedLab.resident = script, [], []
        ScriptedLab.pooled = []
        self.attempts += 1
        lease = self.store.claim(self.config.run_id, f"worker {self.attempts}", 60)
        assert lease
        agents = agents or [Scripted([idea(name) for name in script])]
        return Search(self.config, self.store, self.on_event, agents).run(lease)  # type: ignore[arg-type]

    def on_event(self, kind: str, payload: dict[str, Any]) -> None:
        self.heard.append((kind, payload))

    def abandon(self) -> None:
        """The worker's lease has expired: it was killed."""
        path = self.config.run_dir / "lease.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"expires": 0.0, "ended": None}))

    def states(self) -> dict[tuple[str, int], State]:
        state = self.store.load(self.config.run_id)
        names = {c.artifact_hash: c.name for c in state.candidates}
        return {(names[e.artifact_hash], e.tier): e.state for e in state.experiments}

    def names(self) -> dict[str, str]:
        return {c.artifact_hash: c.name for c in self.store.load(self.config.run_id).candidates}

    def of(self, name: str) -> list[Experiment]:
        """The candidate's experiments in the order measured."""
        names = self.names()
        return [e for e in self.store.load(self.config.run_id).experiments if names[e.artifact_hash] == name]

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [payload for heard, payload in self.heard if heard == kind]


def idea(name: str, mechanism: str = "python", focus: str = "attention") -> Proposal:
    return proposal(name, {"forward.py": f"def {name}(): ...\n"}, focus, mechanism)


@pytest.fixture(scope="module")
def scene(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_of(tiny_model, tmp_path_factory.mktemp("scene"))


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    harness = Harness(tmp_path, tiny_model)
    monkeypatch.setattr(Scene, "of", classmethod(lambda cls, config: scene))

    class ScriptedFinals:
        def __init__(self, *args: Any) -> None: ...

        def conclude(self, finalists: list[Tried]) -> dict[str, Any]:
            harness.finalists = [t.candidate.name for t in finalists]
            return {"outcome": "no_gain", "reason": "A test ends here.", "speedup": None}

    monkeypatch.setattr(search_module, "Lab", ScriptedLab)
    monkeypatch.setattr(search_module, "Finals", ScriptedFinals)
    monkeypatch.setattr(ScriptedLab, "before_tier_two", staticmethod(lambda name: None))
    yield harness


KEPT, LOST = answer(1.5, State.KEEP), answer(0.97, State.DISCARD)


def test_only_what_beats_the_incumbent_goes_on_to_all_layers(run: Harness) -> None:
    run.search(
        {
            "first": (answer(1.5, State.KEEP), answer(1.4, State.KEEP)),
            "slower": (LOST,),
            "better": (answer(1.2, State.KEEP), answer(1.6, State.KEEP, 1.1, State.KEEP)),
            "marginal": (answer(1.05, State.MARGINAL), answer(1.2, State.MARGINAL, 0.8, State.DISCARD)),
        }
    )
    assert ScriptedLab.asked == [
        (1, "first", ""),
        (2, "first", ""),
        (1, "slower", "first"),
        (1, "better", "first"),
        (2, "better", "first"),
        (1, "marginal", "better"),
        (2, "marginal", "better"),
    ]


def test_speed_over_the_baseline_is_the_chain_through_the_incumbent(run: Harness) -> None:
    run.search({"first": (answer(2.0, State.KEEP), KEPT), "second": (answer(0.9, State.DISCARD),)})
    found = {e.id[-1] + run.names()[e.artifact_hash]: e for e in run.store.load(run.config.run_id).experiments}
    first, second = found["1first"], found["1second"]
    assert second.against == first.artifact_hash and second.paired == pytest.approx(0.9, rel=1e-3)
    assert second.ratio == pytest.approx(1.8, rel=1e-3)
    assert second.paired_high is not None and second.ci_high is not None and second.ci_low is not None
    own = second.paired_high / second.paired
    assert second.ci_high / second.ratio > own, "the incumbent's own uncertainty is in it"
    assert first.paired == first.ratio and first.against != second.against


def test_the_challenger_wins_by_the_turns_against_the_incumbent(run: Harness) -> None:
    run.search(
        {
            "first": (KEPT, answer(1.4, State.KEEP)),
            "loses": (KEPT, answer(1.5, State.KEEP, 1.02, State.RETEST)),  # a better ratio, of another moment
            "wins": (KEPT, answer(1.3, State.KEEP, 1.1, State.KEEP)),
        }
    )
    assert [p["name"] for p in run.kinds("incumbent")] == ["first", "wins"]
    assert ScriptedLab.resident == [("first",), ("first",), ("wins",)]
    assert run.finalists == ["wins", "loses", "first"], "the incumbent first, then by ratio"


def test_what_cannot_be_told_from_the_incumbent_comes_back_twice_at_most(run: Harness) -> None:
    unsure = answer(1.05, State.RETEST)
    script: Script = {
        "unsure": (unsure, KEPT, unsure, unsure),
        "proves": (unsure, KEPT, answer(1.06, State.KEEP)),
        **{f"other{i}": (LOST,) for i in range(9)},
    }
    run.search(script)
    asked = [name for tier, name, _ in ScriptedLab.asked if tier == 1]
    assert asked.count("unsure") == 3 and asked.count("proves") == 2
    assert asked[:2] == ["unsure", "proves"] and asked[2].startswith("other"), "others are measured meanwhile"
    assert next(n for name, n in ScriptedLab.pooled if name == "unsure") == 0
    assert (2, "proves", "") in ScriptedLab.asked and (2, "unsure", "proves") not in ScriptedLab.asked
    visits = [e.visit for e in run.of("unsure")]
    assert visits == [1, 2, 3] and [len(e.samples) for e in run.of("proves") if e.tier == 1] == [3, 6]


def test_other_text_that_does_the_same_is_one_program(run: Harness) -> None:
    same = answer(1.5, State.KEEP, behaviour="b1")
    agent = Scripted([idea("first"), idea("copy"), idea("other")])
    run.search(
        {"first": (same, KEPT), "copy": (same,), "other": (answer(0.9, State.DISCARD, behaviour="b2"),)}, [agent]
    )
    assert [(tier, name) for tier, name, _ in ScriptedLab.asked] == [(1, "first"), (2, "first"), (1, "other")]
    (copy,) = run.of("copy")
    (first,) = (e for e in run.of("first") if e.tier == 1)
    assert copy.state is State.DUPLICATE and copy.same_as == first.artifact_hash and copy.ratio == first.ratio
    counts = run.kinds("progress")[-1]["counts"]
    assert (counts["tier1"], counts["duplicates"], counts["distinct_behaviours"]) == (2, 1, 2)
    posts = run.store.load(run.config.run_id).posts
    (said,) = (p for p in posts if p.data.get("same_as") == "first")
    assert said.kind == "dead_end" and "does the same as first" in said.text and "1.50x" in said.text
    assert said.data["same_as_hash"] == first.artifact_hash
    claims = {p.id: p.text for p in posts if p.kind == "claim"}
    assert [claims[p.reply_to] for p in posts if p.kind in ("result", "dead_end")] == ["first", "copy", "other"]
    assert "copy" in {name for name, _ in agent.heard}


def test_the_same_program_under_another_scheduling_is_judged_on_the_traffic_alone(run: Harness) -> None:
    same = answer(1.5, State.KEEP, behaviour="b1")
    kept = answer(1.6, State.KEEP, 1.1, State.KEEP)
    knob = replace(idea("knob", mechanism="settings"), settings={"policy": "prefill_first"})
    default = replace(idea("default", mechanism="settings"), settings={"policy": "mixed"})
    script: Script = {"first": (same, KEPT), "knob": (same, kept), "default": (same, kept)}
    run.search(script, [Scripted([idea("first"), knob, default])])
    assert [(tier, name) for tier, name, _ in ScriptedLab.asked] == [(1, "first"), (2, "first"), (2, "knob")]
    assert run.finalists[0] == "knob"


def test_what_no_more_than_seemed_to_win_is_no_incumbent(run: Harness) -> None:
    run.search({"unsure": (KEPT, answer(1.1, State.RETEST))})
    assert run.kinds("incumbent") == [] and run.finalists == []
    assert ScriptedLab.resident == [()]


@pytest.mark.parametrize(
    "failure",
    [
        WrongValues("wrong values: mean KL 3"),
        TooFast("a step took 0.01 ms"),
        HostFailure("host_exited", "The engine host ended (exit status 7).", log_tail="the last words", fatal=True),
    ],
)
def test_a_failure_at_either_tier_costs_the_candidate_only(run: Harness, failure: Exception) -> None:
    run.search({"one": (failure,), "two": (KEPT, failure), "good": (KEPT, KEPT)})
    states = run.states()
    assert states["one", 1] is State.FAILED and states["two", 1] is State.KEEP and states["two", 2] is State.FAILED
    assert states["good", 2] is State.KEEP and run.finalists == ["good"]
    failed = [e for e in run.store.load(run.config.run_id).experiments if e.state is State.FAILED]
    assert all(str(failure).startswith(e.failure) and e.ratio is None for e in failed)
    if isinstance(failure, HostFailure):
        assert {e.log_tail for e in failed} == {"the last words"}


def test_agents_and_board_hear_of_every_result(run: Harness) -> None:
    agents = [Scripted([idea("good")], name="ada"), Scripted([idea("bad")], name="bob", focus="cache")]
    run.search({"good": (KEPT, KEPT), "bad": (LOST,)}, agents)
    for agent in agents:
        assert sorted((name, e.tier) for name, e in agent.heard) == [("bad", 1), ("good", 2)]
    posts = run.store.load(run.config.run_id).posts
    assert Counter(p.kind for p in posts) == {"claim": 2, "result": 1, "dead_end": 1}


def test_what_is_predicted_to_be_slow_is_counted_apart_and_never_measured(
    run: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict = CostModel.predict

    def gloomy(model: CostModel, digest: str, focus: str, *rest: Any) -> Any:
        found = predict(model, digest, focus, *rest)
        return found if focus != "cache" else Estimate(digest, 0.5, 0.4, 0.6, "fitted")

    monkeypatch.setattr(CostModel, "predict", gloomy)
    agents = [Scripted([idea("good"), idea("hopeless", focus="cache")])]
    run.search({"good": (KEPT, KEPT)}, agents)
    assert run.states()["hopeless", 1] is State.PREDICTED
    assert "hopeless" not in {name for _, name, _ in ScriptedLab.asked}
    counts = run.kinds("progress")[-1]["counts"]
    assert (counts["predicted"], counts["tier1"], counts["distinct_sources"]) == (1, 1, 1)


def test_a_proposal_that_is_no_candidate_is_passed_over(run: Harness) -> None:
    bad = proposal("bad", {"../forward.py": "x = 1\n"})
    run.search({"good": (KEPT, KEPT)}, [Scripted([bad, idea("good")])])
    assert ("good", 2) in run.states()
    assert any("bad is not a candidate" in p["text"] for p in run.kinds("log"))


class Killed(BaseException):
    """The process ends here."""


def killed(candidate: str) -> None:
    raise Killed


def killed_at(run: Harness, name: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first attempt whose worker is killed as `name` begins at tier 2."""

    def end(candidate: str) -> None:
        if candidate == name:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedLab, "before_tier_two", staticmethod(end))
        with pytest.raises(Killed):
            run.search(script)
    run.abandon()


def test_a_resumed_search_repeats_nothing_and_knows_its_incumbent(
    run: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Script = {
        "first": (KEPT, answer(1.4, State.KEEP)),
        "bad": (LOST,),
        "third": (KEPT, answer(1.6, State.KEEP, 1.2, State.KEEP)),
        "fourth": (LOST,),
    }
    killed_at(run, "third", script, monkeypatch)
    before = run.states()
    assert set(before) == {("first", 1), ("first", 2), ("bad", 1), ("third", 1)}
    agent = Scripted([idea(name) for name in script])
    run.search(script, [agent])
    measured = [(tier, name) for tier, name, _ in ScriptedLab.asked]
    assert not {(n, t) for t, n in measured} & set(before), "nothing was measured twice"
    assert ("fourth", 1) in run.states() and before.items() <= run.states().items()
    assert {name for name, _ in agent.heard} == set(script), "agents hear again what earlier attempts measured"


def test_a_candidate_that_was_cut_short_between_the_tiers_goes_on(
    run: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Script = {
        "first": (KEPT, answer(1.4, State.KEEP)),
        "third": (KEPT, answer(1.6, State.KEEP, 1.2, State.KEEP)),
    }
    killed_at(run, "third", script, monkeypatch)
    run.search(script)
    assert ScriptedLab.asked == [(2, "third", "first")]
    assert run.finalists == ["third", "first"]
    posts = [p.data["name"] for p in run.store.load(run.config.run_id).posts if p.kind == "result"]
    assert sorted(posts) == ["first", "third"]


def test_a_resumed_search_shows_its_agents_the_stored_board(run: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    script: Script = {"bad": (LOST,), "first": (KEPT, KEPT), "later": (LOST,)}

    class Curious(Scripted):
        """Asks once, when it first has the floor."""

        def sit(self, desk: Desk) -> None:
            self.desk = desk

        def talk(self, view: SearchView) -> None:
            if not any(p.kind == "question" for p in view.posts):
                self.desk.post(self.name, "question", "Does a block of 32 help?", data={"to": "cache"})

    class Reads(Scripted):
        seen: tuple[Post, ...] = ()

        def propose(self, view: SearchView) -> Proposal | None:
            self.seen = self.seen or view.posts
            return super().propose(view)

    asker, reader = Curious([idea("bad"), idea("first")]), Reads([idea("later")])
    with monkeypatch.context() as patch:
        patch.setattr(ScriptedLab, "before_tier_two", staticmethod(killed))
        with pytest.raises(Killed):
            run.search(script, [asker])
    run.abandon()
    stored = run.store.load(run.config.run_id).posts
    run.search(script, [reader])
    assert {p.kind for p in stored} == {"claim", "dead_end", "question"}
    assert all(post in reader.seen for post in stored), "claims, dead ends and the question that nobody answered"


def test_what_was_claimed_and_not_measured_is_measured_first(run: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    script: Script = {"first": (KEPT, KEPT), "claimed": (LOST,), "later": (LOST,)}
    killed_at(run, "first", {"first": script["first"], "claimed": (LOST,)}, monkeypatch)
    assert {p.name for p in run.store.load(run.config.run_id).proposals} == {"first", "claimed"}
    run.search(script, [Scripted([idea("later")])])
    assert [name for tier, name, _ in ScriptedLab.asked if tier == 1] == ["claimed", "later"]


def test_a_person_stops_it_between_measurements(run: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.ledger.Ledger.check", cancelled_after(2))
    assert run.search({"first": (LOST,), "second": (LOST,), "third": (LOST,)}) is None
    assert [name for _, name, _ in ScriptedLab.asked] == ["first", "second"]
    finished = run.kinds("finished")[-1]
    assert finished["outcome"] == "cancelled" and "2 measured candidates are kept" in finished["reason"]
    assert run.store.load(run.config.run_id).phase == "cancelled"


def cancelled_after(count: int) -> Callable[[Ledger], None]:
    """`Ledger.check` that raises once so many candidates were measured."""

    def check(ledger: Ledger) -> None:
        if len(ledger.experiments) >= count:
            raise Cancelled

    return check


def test_a_worker_that_lost_its_run_leaves_it_alone(run: Harness) -> None:
    def taken(name: str) -> None:
        run.abandon()
        assert run.store.claim(run.config.run_id, "another", 60)

    ScriptedLab.before_tier_two = staticmethod(taken)
    with pytest.raises(LeaseLost):
        run.search({"first": (KEPT, KEPT)})
    assert set(run.states()) == {("first", 1)} and run.kinds("finished") == []


def test_an_error_of_our_own_ends_the_run_with_its_reason(run: Harness) -> None:
    with pytest.raises(ZeroDivisionError):
        run.search({"first": (ZeroDivisionError("by nought"),)})
    assert run.kinds("finished")[-1]["outcome"] == "failed"
    assert "ZeroDivisionError: by nought" in run.kinds("finished")[-1]["reason"]


def test_a_host_that_does_not_start_is_a_sentence(run: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_host(lab: ScriptedLab) -> None:
        raise HostFailure("host_exited", "The engine host ended (exit status 1).", "Its log says why.")

    monkeypatch.setattr(ScriptedLab, "open", no_host)
    with pytest.raises(SearchFailed, match="exit status 1"):
        run.search({"first": (KEPT, KEPT)})
    assert run.kinds("finished")[-1]["outcome"] == "failed"


def test_without_agents_it_ends_calmly(run: Harness) -> None:
    assert run.search({}, [Scripted([])]) is not None
    assert run.finalists == [] and run.kinds("finished")[-1]["outcome"] == "no_gain"


def test_no_candidate_is_begun_when_the_time_for_it_is_over(run: Harness) -> None:
    lease = run.store.claim(run.config.run_id, "earlier", 60)
    assert lease
    run.store.set_progress(lease, "search", 599.0)
    run.abandon()
    run.search({"first": (KEPT, KEPT)})
    assert ScriptedLab.asked == [] and run.kinds("finished")[-1]["outcome"] == "no_gain"


def test_where_the_search_stands_is_told_and_a_resumed_run_tells_the_same(
    run: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Script = {
        "whole_step": (answer(3.0, State.KEEP), answer(3.0, State.KEEP)),
        "packed_linear": (LOST,),
        "third": (KEPT, answer(1.6, State.KEEP, 1.2, State.KEEP)),
    }
    killed_at(run, "third", script, monkeypatch)
    foci, elites = (run.kinds(kind)[-1]["rows"] for kind in ("foci", "elites"))
    assert {row["focus"] for row in foci} == {"attention", "projections", "cache", "scheduling"}
    kinds = {row["name"]: row["cell"]["fusion"] for row in elites}
    assert kinds == {"whole_step": "whole step", "packed_linear": "apart"}
    attention = next(row for row in foci if row["focus"] == "attention")
    assert attention["kept"] == 1 and attention["proposals"] == 3 and "1 of its last 2 paid off" in attention["why"]
    assert 0 < attention["worth"] < run.kinds("foci")[0]["rows"][0]["worth"], "less is left beside a faster incumbent"
    run.heard.clear()
    run.search(script, [Scripted([])])
    assert run.kinds("elites")[0]["rows"] == elites
    again = next(row for row in run.kinds("foci")[0]["rows"] if row["focus"] == "attention")
    assert {k: again[k] for k in ("worth", "pays", "kept")} == {k: attention[k] for k in ("worth", "pays", "kept")}
