"""Buckets, neighbours, and what a group knows."""

from __future__ import annotations

import json
import math
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from overweave.ir.epilogue import Epilogue
from overweave.ir.problem import Problem
from overweave.schedules.records.outside import OUTSIDE, TORCH_FUSED
from overweave.tuner.store.cache import (
    FARTHEST,
    MOST_ENTRIES,
    Entry,
    Fingerprint,
    Knowledge,
    Table,
    Time,
    bucket,
    bucket_problem,
    distance,
    ranked,
)
from tests.source_tree import ROOT

OWN = Fingerprint(device="d", world_size=4, driver="1", torch="2", triton="3", overweave="4")
PROBLEM = Problem(operator="all_gather_matmul", m=1024, n=512, k=256, world_size=4, dtype="bfloat16")
NOTHING = Table(fingerprint=OWN)


def entry(problem: Problem = PROBLEM, plan: str = "sequential") -> Entry:
    return Entry(problem, (Time(plan, {}, 10.0),))


@given(st.integers(0, 1 << 24))
@settings(deadline=None)  # a busy machine is no failure
def test_a_bucket_holds_its_rows_and_little_more(rows: int):
    assert rows <= bucket(rows) <= 1.5 * rows
    assert bucket(bucket(rows)) == bucket(rows)
    assert rows == 0 or bucket(rows - 1) <= bucket(rows)


def test_the_buckets():
    assert sorted({bucket(rows) for rows in range(17)}) == [0, 1, 2, 3, 4, 6, 8, 12, 16]
    assert [bucket(rows) for rows in (5, 8192, 8193, 12289)] == [6, 8192, 12288, 16384]


def test_distance_counts_factors_of_two():
    assert distance(PROBLEM, PROBLEM) == 0
    assert distance(PROBLEM, replace(PROBLEM, n=1024)) == 1
    assert distance(PROBLEM, replace(PROBLEM, n=1024, k=128)) == 2
    for near in (
        {"b_is_transposed": True},
        {"returns_gathered": True},
        {"epilogue": Epilogue(bias=True)},
        {"columns": (256, 256)},
    ):
        assert 0 < distance(PROBLEM, replace(PROBLEM, **near)) < FARTHEST
    for other in ({"dtype": "float16"}, {"world_size": 2}, {"operator": "matmul_reduce_scatter"}, {"m": 0}):
        assert distance(PROBLEM, replace(PROBLEM, **other)) == math.inf


def test_the_order_of_knowledge():
    """Own, shipped, neighbour."""
    own, shipped = entry(plan="push"), entry(plan="per_shard")
    both = Knowledge(NOTHING.with_entries((own,)), NOTHING.with_entries((shipped,)))
    assert both.find(PROBLEM).entry == own
    assert both.find(PROBLEM).source == "cache"
    found = Knowledge(NOTHING, NOTHING.with_entries((shipped,))).find(replace(PROBLEM, m=1000))
    assert (found.entry, found.source, found.distance) == (shipped, "table", 0)
    near = both.find(replace(PROBLEM, k=300))
    assert (near.entry, near.source) == (own, "nearest")
    assert near.distance == pytest.approx(math.log2(300 / 256))
    assert both.find(replace(PROBLEM, k=512)) is None
    assert Knowledge(NOTHING, None).find(PROBLEM) is None


def test_the_nearest_of_several_and_its_limit():
    near, far = entry(replace(PROBLEM, n=520)), entry(replace(PROBLEM, n=600))
    known = Knowledge(NOTHING.with_entries((far, near)), None)
    assert known.find(PROBLEM).entry == near
    edge = round(512 * 2**FARTHEST)
    assert Knowledge(NOTHING.with_entries((entry(),)), None).find(replace(PROBLEM, n=edge + 2)) is None
    assert Knowledge(NOTHING.with_entries((entry(),)), None).find(replace(PROBLEM, n=edge - 2)) is not None


def test_digests_tell_knowledge_apart():
    known = Knowledge(NOTHING.with_entries((entry(),)), None)
    assert known.digest == Knowledge(NOTHING.with_entries((entry(),)), None).digest
    others = [
        Knowledge(NOTHING, None),
        Knowledge(NOTHING, NOTHING.with_entries((entry(),))),
        Knowledge(NOTHING.with_entries((entry(plan="push"),)), None),
    ]
    assert len({known.digest, *(other.digest for other in others)}) == 4


def test_new_entries_take_the_place_of_old_ones_and_the_oldest_go():
    table = NOTHING.with_entries((entry(plan="push"),)).with_entries((entry(),))
    assert table.entries == (entry(),)
    many = tuple(entry(replace(PROBLEM, n=n)) for n in range(1, MOST_ENTRIES + 2))
    full = NOTHING.with_entries(many)
    assert len(full.entries) == MOST_ENTRIES
    assert full.entries[-1] == many[-1]
    assert many[0] not in full.entries


def test_the_bucket_of_a_problem_keeps_the_rest():
    assert bucket_problem(replace(PROBLEM, m=1000)) == PROBLEM


def test_the_quickest_wins_and_the_least_host_work_takes_ties():
    def order(*times: tuple[str, float]) -> list[str]:
        rows = [Time(name.rstrip("2"), {"pieces": 2} if name.endswith("2") else {}, us) for name, us in times]
        return [time.plan + "2" * bool(time.options) for time in ranked(PROBLEM.operator, rows)]

    assert order(("sequential", 110), ("push", 100), ("pull", 120)) == ["push", "sequential", "pull"]
    assert order(("sequential", 101.9), ("push", 100), ("pull", 120)) == ["sequential", "push", "pull"]
    assert order(("sequential", 102.1), ("push", 100)) == ["push", "sequential"]
    assert order(("torch.fused", 100), ("push2", 101), ("push", 101.9)) == ["push", "push2", "torch.fused"]
    assert ranked(PROBLEM.operator, []) == ()


def test_torchs_fused_operators_cost_the_host_what_was_measured():
    found: list[float] = []
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        for run in json.loads(path.read_text()).get("runs", ()):
            eager = [case for case in run["cases"] if not case.get("is_replayed")]
            found += [row["host_us"] for case in eager for row in case["methods"] if row["name"] == "torch_fused"]
    measured = [us for us in found if us]
    assert len(measured) > 200
    assert min(measured) == pytest.approx(OUTSIDE[TORCH_FUSED].least_host_us, abs=1.0)
    assert quantiles(measured, n=4)[2] == pytest.approx(OUTSIDE[TORCH_FUSED].host_us, abs=1.0)
