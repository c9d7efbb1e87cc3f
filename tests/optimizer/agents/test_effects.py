"""Effects of values: shared over programs, apart from the tier, unsure where little was measured."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from optimizer.agents.effects import VALUE_MEAN, VALUE_SD, Effects, relative
from optimizer.agents.programs.program import Program

WHOLE = Program.of(["whole_step"])
DEEP, EAGER = {"PM_PREFETCH": 4096}, {"PM_SPIN": 20000}


def test_a_value_measured_in_many_programs_is_known_and_carries_over_to_others() -> None:
    speeds = {WHOLE: 3.0, WHOLE.plus(PM_DEAL=1): 2.9}
    speeds |= {p.plus(**DEEP): 1.2 * s for p, s in speeds.items()}
    effects = Effects(speeds, dict.fromkeys(speeds, 1))
    assert 1.04 < relative(effects, WHOLE.plus(**DEEP, **EAGER), WHOLE.plus(**EAGER)) < 1.2
    assert relative(effects, WHOLE.plus(PM_DEAL=1), WHOLE) < 1


def test_what_the_tiers_differ_by_is_no_merit_of_a_value() -> None:
    lone = WHOLE.plus(**EAGER)
    speeds = {WHOLE: 3.0, WHOLE.plus(**DEEP): 3.0, WHOLE.plus(PM_DEAL=1): 3.0, lone: 3.4}
    first = dict.fromkeys(speeds, 1)
    same, deeper = Effects(speeds, first), Effects(speeds, first | {lone: 2})
    assert 0 < deeper.of(lone) - VALUE_MEAN < 0.5 * (same.of(lone) - VALUE_MEAN)


def test_draws_scatter_where_little_is_known_and_repeat_for_a_seed() -> None:
    known = WHOLE.plus(**DEEP)
    speeds = {p.plus(PM_SPIN=s): 3.0 for p in (WHOLE, known) for s in (200, 1000, 4000, 20000)}
    effects = Effects(speeds, {})
    drawn = [effects.draw(np.random.default_rng(i)) for i in range(200)]
    unknown = [d.of(WHOLE.plus(PM_UNROLL=8)) for d in drawn]
    assert statistics.stdev(d.of(known) for d in drawn) < 0.8 * statistics.stdev(unknown)
    assert statistics.stdev(unknown) == pytest.approx(VALUE_SD, rel=0.2)
    again = effects.draw(np.random.default_rng(7))
    assert again.of(known) == drawn[7].of(known) and again.of(known) == again.of(known)


def test_nothing_measured_means_the_prior() -> None:
    effects = Effects({}, {})
    assert effects.of(WHOLE) == 0 and effects.of(WHOLE.plus(**DEEP)) == VALUE_MEAN
    assert relative(effects, WHOLE.plus(**DEEP), WHOLE) == pytest.approx(math.exp(VALUE_MEAN))
    assert effects.draw(np.random.default_rng(1)).of(WHOLE) == 0
