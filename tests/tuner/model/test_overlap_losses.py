"""What cutting and overlapping lose on paper: the trends of FiCCO's characterization."""

from __future__ import annotations

from statistics import geometric_mean

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.problem import Problem
from overweave.tuner.model.overlap_losses import (
    BESIDE,
    MATMULS,
    TRANSFER,
    correlation,
    geomean,
    losses_of,
    predicted_losses,
)

MESH = load("mi300x8")
TALL = Problem(operator="all_gather_matmul", m=131072, n=2048, k=16384, world_size=8, dtype="bfloat16")
DEEP = replace(TALL, m=16384, k=131072)
ALL = (*MATMULS, TRANSFER, *BESIDE)


def test_the_worse_cut_is_that_of_the_shorter_side_and_finer_cuts_lose_more():
    tall, deep = (predicted_losses("g", problem, MESH, MATMULS).factors for problem in (TALL, DEEP))
    assert deep["rows / W W"] > deep["columns / W W"]
    assert tall["columns / W W"] > tall["rows / W W"]
    for factors in (tall, deep):
        assert factors["rows / W W"] >= factors["rows / W"] >= 1
        assert factors["columns / W W"] >= factors["columns / W"] >= 1


def test_a_cut_transfer_loses_more_the_smaller_it_is():
    sizes = [replace(TALL, m=m) for m in (16384, 131072, 1048576)]
    lost = [predicted_losses("g", problem, MESH, (TRANSFER,)).factors[TRANSFER] for problem in sizes]
    assert lost == sorted(lost, reverse=True)
    assert all(factor > 1 for factor in lost)


@pytest.mark.slow
def test_copies_slow_a_matmul_by_what_the_machine_says_and_a_library_takes_its_sms():
    factors = predicted_losses("g", replace(TALL, n=4096), MESH, BESIDE).factors
    assert 1 < factors["matmul beside copies"] <= MESH.sharing.copy_engine.factor
    all_sms = replace(MESH, sharing=replace(MESH.sharing, collective=replace(MESH.sharing.collective, sms=300)))
    held = predicted_losses("g", replace(TALL, n=4096), all_sms, BESIDE).factors
    assert held["matmul beside the library"] - 1 > 3 * (factors["matmul beside the library"] - 1) > 0


def test_only_what_is_wanted_is_told():
    assert tuple(predicted_losses("g", TALL, MESH, ALL).factors) == ALL
    assert tuple(predicted_losses("g", TALL, MESH, (TRANSFER,)).factors) == (TRANSFER,)


def test_correlations_go_by_order_and_means_are_geometric():
    problems = [replace(TALL, n=n) for n in (512, 1024, 2048)]
    found = [losses_of("g", problem, {"one": 2.0**place, "same": 1.0}) for place, problem in enumerate(problems)]
    assert correlation(found, "one", "op_to_byte") == pytest.approx(1.0)
    assert correlation(found[::-1], "one", "traffic_bytes") == pytest.approx(1.0)
    falling = [losses_of("g", problem, {"one": -float(place)}) for place, problem in enumerate(problems)]
    assert correlation(falling, "one", "op_to_byte") == pytest.approx(-1.0)
    assert correlation(found, "same", "op_to_byte") == 0.0
    assert geomean(found, "one") == pytest.approx(2.0)


# m, n, k of a rank, and how many times as long cuBLAS took beside a standing NCCL (four H200s, 2026-11-20).
STANDING = (
    ((8192, 2752, 4096), (1.35, 1.58)),
    ((8192, 3584, 4096), (1.14, 1.76)),
    ((8192, 7168, 8192), (1.22, 1.48)),
    ((2048, 12288, 12288), (1.19, 1.67)),
    ((8192, 2048, 8192), (1.43, 1.91)),
)


def test_a_library_matmul_beside_a_standing_collective_takes_as_long_as_measured():
    """Collectives of a twentieth of the speed outlast the matmuls."""
    machine = load("h200x4")
    slow = tuple(
        replace(curve, points=tuple((size, rate / 20) for size, rate in curve.points)) for curve in machine.collectives
    )
    machine, found = replace(machine, collectives=slow), []
    for (m, n, k), _ in STANDING:
        problem = Problem(operator="all_gather_matmul", m=4 * m, n=n, k=k, world_size=4, dtype="bfloat16")
        losses = predicted_losses("", problem, machine, ("matmul beside the library",))
        found.append(losses.factors["matmul beside the library"])
    assert all(1.14 < factor < 1.91 for factor in found), found
    measured = geometric_mean([(low * high) ** 0.5 for _, (low, high) in STANDING])
    assert geometric_mean(found) == pytest.approx(measured, rel=0.05)
