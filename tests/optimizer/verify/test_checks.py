"""Every check passes the baseline's own program and fails the very program that was made to fail it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient, HostFailure
from engine.models.config import ModelConfig
from kernels.build import compile_cpp, has_compiler
from optimizer.measure.rig import Rig
from optimizer.records import Check, Verdict
from optimizer.verify import contamination, experts, integrity, quality, serving
from optimizer.verify.bench import FORCED, Bench
from optimizer.verify.faults import CONTROLS, LEAKY_PLAN, LEAKY_TAIL, Fault

MakeBench = Callable[..., Bench]
QUALITY = ("distance from float32", "perplexity", "exactness")
OF_EXPERTS = tuple(experts.CHECKS)  # asked of models that have them: test_experts.py
OF_TIME = ("baseline speed", "physical floor")  # verdicts of a clock: judged below on times that are given
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Iterator[HostClient]:
    """A second process: the model in float32."""
    with HostClient(tiny_model, dtype="float32", threads=1, kv_bytes=8 << 20) as host:
        yield host


@pytest.fixture
def bench_of(
    host: HostClient,
    baseline: Artifact,
    tiny_config: ModelConfig,
    text: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> MakeBench:
    """A bench for a candidate; only a `timed` one takes the baseline's speed."""

    def make(candidate: Artifact, timed: bool = False) -> Bench:
        if not timed:
            monkeypatch.setattr(Bench, "baseline_seconds", lambda self: 1.0)
        return Bench(host, candidate, baseline, tiny_config, text, seed=4711)

    return make


def run(bench: Bench, name: str, reference: HostClient, artifacts: ArtifactStore) -> list[Check]:
    if name in QUALITY:
        return quality.judge(bench, reference, "exact" if name == "exactness" else "near", scale=0.5)
    if name == "proof of application":
        return integrity.application(bench, artifacts)
    if name == "threads":
        return integrity.baseline_speed(bench)
    return (contamination.CHECKS | serving.CHECKS | integrity.CHECKS)[name](bench)


def verdicts(checks: list[Check], name: str) -> set[Verdict]:
    found = {c.verdict for c in checks if c.check == name}
    assert found, f"no row is called {name}"
    return found


def test_every_check_has_a_planted_fault() -> None:
    named = {*contamination.CHECKS, *serving.CHECKS, *experts.CHECKS, *integrity.CHECKS, *QUALITY}
    assert named | {"physical floor", "proof of application", "threads"} == set(CONTROLS)


@pytest.mark.parametrize("name", sorted(set(CONTROLS) - {*OF_TIME, *OF_EXPERTS}))
def test_it_passes_the_baselines_own_program(
    name: str, bench_of: MakeBench, twin: Artifact, reference: HostClient, artifacts: ArtifactStore
) -> None:
    assert verdicts(run(bench_of(twin), name, reference, artifacts), name) == {Verdict.PASS}


REFUSED = ("poison",)  # NaN that reached the logits is refused by the host at once
OTHERWISE = ("physical floor", "proof of application", *REFUSED, *OF_EXPERTS)  # have tests of their own


@pytest.mark.parametrize(
    "name",
    [
        # a thread that spins makes every step wait for it
        pytest.param(n, marks=pytest.mark.slow) if n == "baseline speed" else n
        for n in sorted(set(CONTROLS) - set(OTHERWISE))
    ],
)
def test_it_catches_its_planted_fault(
    name: str,
    bench_of: MakeBench,
    baseline: Artifact,
    host: HostClient,
    reference: HostClient,
    artifacts: ArtifactStore,
) -> None:
    fault = CONTROLS[name]
    bench = bench_of(fault.store(artifacts, baseline), timed=name == "baseline speed")
    checks = run(bench, name, reference, artifacts)
    if fault.dirty:
        host.restart()
    assert Verdict.FAIL in verdicts(checks, name)
    assert Verdict.INCONCLUSIVE not in verdicts(checks, name)


def test_poison_that_reaches_the_logits_is_caught_as_nan_and_as_numbers(
    bench_of: MakeBench, baseline: Artifact, artifacts: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaky = CONTROLS["poison"].store(artifacts, baseline)
    with pytest.raises(HostFailure, match="NaN"):
        contamination.poison(bench_of(leaky))
    bench = bench_of(leaky)
    fill = bench.rig.fill
    monkeypatch.setattr(Rig, "fill", lambda rig, blocks, value: fill(blocks, 1.0 if value != value else value))
    numbers = [c for c in contamination.poison(bench) if c.case.startswith("numbers")]
    assert verdicts(numbers, "poison") == {Verdict.FAIL}


CACHE_OF_INTEGERS = """    def allocate(self, blocks):
        plain = super().allocate(blocks)
        levels = tuple(torch.zeros_like(t, dtype=torch.int8) for t in plain.tensors)
        return KVPool(levels, self.block_size, plain.bytes_per_block // plain.tensors[0].element_size())

    def __call__(self, batch, kv):
        plain = tuple(0.05 * t.float() for t in kv.tensors)
        out = super().__call__(batch, KVPool(plain, self.block_size, 0))
        for levels, numbers in zip(kv.tensors, plain):
            levels, numbers = (t.view(-1, *t.shape[2:]) for t in (levels, numbers))
            levels[batch.slot] = (numbers[batch.slot] / 0.05).round().clamp(-127, 127).to(torch.int8)
        return out

"""


@pytest.mark.parametrize(("leak", "verdict"), [("", Verdict.PASS), (LEAKY_TAIL.body, Verdict.FAIL)])
def test_poison_reaches_a_pool_of_integers_too(
    leak: str, verdict: Verdict, bench_of: MakeBench, baseline: Artifact, artifacts: ArtifactStore
) -> None:
    """Integers have no NaN: the planted fault is seen by what their extremes change."""
    candidate = Fault("a cache of integers", CACHE_OF_INTEGERS + leak, before=LEAKY_PLAN).store(artifacts, baseline)
    checks = contamination.poison(bench_of(candidate))
    assert [c.verdict for c in checks] == [verdict, verdict]


@needs_compiler
def test_a_kernel_that_is_brought_and_not_called_is_no_proof(
    bench_of: MakeBench, baseline: Artifact, artifacts: ArtifactStore, tmp_path: Path
) -> None:
    fault = CONTROLS["proof of application"]
    source = tmp_path / "unused.cpp"
    source.write_text(fault.cpp)
    built = compile_cpp(source, out_dir=tmp_path)
    assert built.path is not None, built.log
    idle = fault.store(artifacts, baseline, {"unused": built.path})
    (check,) = integrity.application(bench_of(idle), artifacts)
    assert check.verdict is Verdict.FAIL and "not what was measured" in check.detail
    files = baseline.files()
    files["forward.py"] = files["forward.py"].replace(
        "        self.config = c = model.config\n",
        "        self.config = c = model.config\n        assert settings.library('unused').unused() == 1\n",
    )
    used = artifacts.put(files | {"unused.cpp": fault.cpp}, name="used", libraries={"unused": built.path})
    (check,) = integrity.application(bench_of(used), artifacts)
    assert check.verdict is Verdict.PASS, check.detail


def test_no_step_may_be_shorter_than_the_floor(bench_of: MakeBench, twin: Artifact) -> None:
    bench = bench_of(twin)
    assert integrity.floor(bench, 0.0) == [], "without a measured ceiling there is no floor"
    assert integrity.floor(bench, 1e-9)[0].verdict is Verdict.PASS
    (failed,) = integrity.floor(bench, 60.0)
    assert failed.verdict is Verdict.FAIL
    assert failed.value is not None and failed.value < failed.limit == 0.8 * 60


def test_an_answer_from_memory_is_below_the_floor(
    bench_of: MakeBench, baseline: Artifact, artifacts: ArtifactStore
) -> None:
    replays = CONTROLS["physical floor"].store(artifacts, baseline)
    bench = bench_of(replays, timed=True)
    floor_s = bench.witness_s / FORCED  # the baseline's own step stands for the floor
    # one block is short enough for another program to fall into it
    found = [integrity.floor(bench, floor_s)[0].verdict for _ in range(5)]
    assert Verdict.FAIL in found


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([1.0], Verdict.PASS),
        ([2.0, 1.0], Verdict.PASS),  # something else ran on the machine for a moment
        ([1.3] * 8, Verdict.FAIL),
        ([4.0], Verdict.FAIL),  # not measured again
    ],
)
def test_a_candidate_may_not_slow_the_baseline_down(
    seconds: list[float], verdict: Verdict, bench_of: MakeBench, twin: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(twin)
    bench.witness_s, given = 1.0, iter(seconds)
    monkeypatch.setattr(bench, "baseline_seconds", lambda: next(given))
    assert verdicts(integrity.baseline_speed(bench), "baseline speed") == {verdict}


def test_pressure_that_did_not_come_is_inconclusive(
    bench_of: MakeBench, twin: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of many blocks pre-empts nobody: the case was not tried, so it did not pass."""
    monkeypatch.setattr(serving, "POOL", 32)
    (check,) = serving.eviction(bench_of(twin))
    assert check.verdict is Verdict.INCONCLUSIVE


def test_a_quantised_candidate_is_bounded_too(
    bench_of: MakeBench, baseline: Artifact, reference: HostClient, artifacts: ArtifactStore
) -> None:
    coarse = CONTROLS["distance from float32"].store(artifacts, baseline)
    rows = quality.judge(bench_of(coarse), reference, "quantised", scale=0.5)
    assert verdicts(rows, "distance from float32") == {Verdict.FAIL}


def test_seeds_are_named_and_two_seeds_ask_other_things(
    bench_of: MakeBench,
    twin: Artifact,
    host: HostClient,
    baseline: Artifact,
    tiny_config: ModelConfig,
    text: tuple[int, ...],
) -> None:
    one = bench_of(twin)
    two = Bench(host, twin, baseline, tiny_config, text, seed=4712)
    assert one.witness_script == bench_of(twin).witness_script
    assert one.witness_script != two.witness_script
    (check,) = contamination.repeats(one)
    assert check.seed_ref == "seed 4711" and isinstance(one.rig, Rig)
