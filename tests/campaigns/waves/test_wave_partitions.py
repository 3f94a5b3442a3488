"""The studies of wave groups, cut short: what they draw from, what they find, and what they write."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from campaigns.waves import operator_speedups, overlap_map, wave_partitions, wave_pattern
from campaigns.waves.simulated import SUMS, Search, Sized, named_us, write_rows
from campaigns.waves.wave_partitions import choice_row, equal_groups, every_partition, random_partition
from overweave.hardware.machine import Machine, load
from overweave.ir.problem import Problem
from overweave.tuner.space.waves import best_partitions

SLOW, LINKED = load("rtx4090x4"), load("a800x4")


def small(operator: str = SUMS[0], machine: Machine = SLOW) -> Sized:
    problem = Problem(operator=operator, m=2048, n=4096, k=8192, world_size=2, dtype="bfloat16")
    return Sized(machine, problem)


def test_all_partitions_are_all():
    for waves in range(1, 8):
        every = list(every_partition(waves))
        assert len(set(every)) == len(every) == 2 ** (waves - 1)
        assert random_partition(waves, random.Random(waves)) in every
        assert equal_groups(waves, 2) in every


def test_what_is_taken_is_never_better_than_the_best_and_named_by_algorithm_1():
    row = choice_row(small())
    assert row["waves"] == Search(small()).costs.waves
    assert 0.9 < float(str(row["reached"])) <= 1.0
    assert float(str(row["first"])) <= float(str(row["reached"]))
    assert named_us(Search(small())) == pytest.approx(
        min(small().simulated_us(groups) for _, groups in best_partitions(small().costs()))
    )


def test_promises_that_are_broken_are_said(tmp_path: Path):
    alike: wave_partitions.Row = dict.fromkeys(wave_partitions.WAYS, 1.0)
    choices = [alike | {"reached": share, "first": share} for share in (1.0, 0.9)]
    told = list(wave_partitions.verdicts([{"error": 0.1}], choices))
    assert [verdict.holds for verdict in told[:3]] == [None, False, False]
    rows = [overlap_map.row(small(operator)) for operator in SUMS]
    *_, share = overlap_map.verdicts(SLOW, [row | {"of_bound": 0.9} for row in rows])
    assert share.holds is True
    assert all(0.5 < float(str(row["of_bound"])) <= 1.0 for row in rows)
    *_, share = overlap_map.verdicts(SLOW, [row | {"of_bound": 0.7} for row in rows])
    assert share.holds is False
    write_rows(tmp_path / "a" / "rows.csv", rows)
    assert (tmp_path / "a" / "rows.csv").read_text().count("\n") == len(rows) + 1


def test_tiles_end_wave_by_wave_and_scattered_ends_are_said():
    sized = small()
    ends = wave_pattern.ends_of(sized)
    assert [verdict.holds for verdict in wave_pattern.verdicts(sized, ends)] == [True, True]
    assert sorted(end.place for end in ends) == list(range(len(ends)))
    late = [*ends[:-1], ends[-1]._replace(wave=0)]
    assert [verdict.holds for verdict in wave_pattern.verdicts(sized, late)] == [True, False]
    between = [ends[0]._replace(end_us=1.5 * ends[0].end_us), *ends[1:]]
    assert [verdict.holds for verdict in wave_pattern.verdicts(sized, between)] == [False, False]


def test_ways_to_overlap_are_those_that_an_operator_has():
    found = operator_speedups.speedups(small("matmul_reduce_scatter", LINKED))
    assert set(found) == {operator_speedups.WAVES, *operator_speedups.OTHERS}
    apart = operator_speedups.speedups(small("matmul_reduce_scatter"))
    assert set(apart) == {operator_speedups.WAVES, "VanillaDecomposition"}, "its GPUs do not reach each other's memory"
    assert apart[operator_speedups.WAVES] > 1
    rows = list(operator_speedups.rows_of("matmul_reduce_scatter", 2, [found, found]))
    assert [row["sizes"] for row in rows] == [2] * len(found)
    assert "by copy engine (Async-TP)" not in operator_speedups.speedups(small("matmul_all_reduce", LINKED))
