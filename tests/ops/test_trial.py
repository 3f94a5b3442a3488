"""A trial says yes only to what is right."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from overweave.ir.problem import Problem
from overweave.ir.timeline.timeline import make_timeline
from overweave.ops.trial import TrialCase, TrialResult, try_on_forked_rank
from overweave.schedules.catalog.catalog import names
from tests.ranks import run_ranks

NAN = float("nan")
SMALL = {"m": 37, "n": 24, "k": 16, "world_size": 3, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("is_exact", "error", "library_error", "is_right"),
    [
        (True, 1e-3, 1e-3, True),
        (True, 0.0, 0.0, True),
        (True, 1.2e-3, 1e-3, False),
        (False, 1e-3, 1e-3, False),
        (True, NAN, 1e-3, False),
    ],
)
def test_what_is_right(is_exact: bool, error: float, library_error: float, is_right: bool):
    case = TrialCase("all_gather_matmul.push", Problem(operator="all_gather_matmul", **SMALL), {}, "cpu")
    timeline = make_timeline("none", "measured", 3, ())
    trial = TrialResult(case=case, is_exact=is_exact, error=error, library_error=library_error, timeline=timeline)
    assert trial.is_right == is_right


@pytest.mark.slow
def test_every_schedule_on_uneven_shards():
    problems = [Problem(operator=name.split(".")[0], **SMALL) for name in names()]
    whole = [replace(problem, m=problem.record.whole_rows(problem.m, problem.world_size)) for problem in problems]
    cases = [TrialCase(name, problem, {}, "cpu") for name, problem in zip(names(), whole, strict=True)]
    told = run_ranks(try_on_forked_rank, 3, tuple(cases))
    assert told[1:] == [None, None]
    trials = msgspec.convert(told[0], list[TrialResult])
    assert [trial.case.schedule for trial in trials] == list(names())
    assert all(trial.is_exact for trial in trials)
    assert all(trial.error < 0.01 and trial.timeline.spans for trial in trials)


@pytest.mark.slow
def test_a_product_without_rows_is_right():
    cases = (TrialCase("all_gather_matmul.push", Problem(operator="all_gather_matmul", **SMALL | {"m": 0}), {}, "cpu"),)
    (trial,) = msgspec.convert(run_ranks(try_on_forked_rank, 3, cases)[0], list[TrialResult])
    assert trial.is_right
    assert trial.error == 0
