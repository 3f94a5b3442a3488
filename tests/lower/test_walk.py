"""Loop nests: proven for every number of ranks, by every path, and bit for bit the product of the whole."""

from __future__ import annotations

from math import prod

import pytest

from overweave.ir.schedule import Collective, Compute, Get, Put
from overweave.lower import AttentionOp, Lowered, MatmulOp, Nest, loops
from tests.lower.cases import PATHS
from tests.lower.emulated import nest_faults
from tests.lower.nests import Written, attentions, matmuls
from tests.ranks import run_ranks

OP, SEQUENCE = MatmulOp(24, 24, 24, "float32"), AttentionOp(2, 12, 24, 2, "float32")


def nests(one: int, op: MatmulOp | AttentionOp) -> dict[str, Written]:
    return matmuls(one) if isinstance(op, MatmulOp) else attentions(one)


def lowered(name: str, one: int = 4, path: str = "template") -> Lowered:
    op = OP if name in matmuls(one) else SEQUENCE
    mesh, words = nests(one, op)[name]
    return loops(Nest(op, words), mesh=mesh, path=path)  # type: ignore[arg-type]


def count(plan: Lowered, kind: type) -> int:
    return sum(isinstance(each, kind) for each in plan.schedule.operations)


def by_ranks(op: MatmulOp | AttentionOp, one: int) -> dict[int, dict[str, Written]]:
    found: dict[int, dict[str, Written]] = {}
    for name, (mesh, words) in nests(one, op).items():
        found.setdefault(prod(mesh), {})[name] = mesh, words
    return found


def test_there_are_enough_nests():
    assert len(matmuls(4)) + len(attentions(4)) >= 12


@pytest.mark.parametrize("path", PATHS)
def test_nests_are_proven(path: str):
    for op in (OP, SEQUENCE):
        for mesh, words in nests(2 + PATHS.index(path), op).values():
            loops(Nest(op, words), mesh=mesh, path=path)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("one", range(2, 9))
def test_all_nests_are_proven(path: str, one: int):
    for op in (MatmulOp(8 * one, 16 * one, 8 * one), AttentionOp(2, one, 4 * one, 2)):
        for mesh, words in nests(one, op).values():
            if prod(mesh) <= 8:
                loops(Nest(op, words), mesh=mesh, path=path)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_few_compute_the_product():
    names = ("ring", "weight_ring", "cannon", "double_ring_attention")
    chosen = {name: (matmuls(2) | attentions(2))[name] for name in names}
    faults = run_ranks(nest_faults, 2, OP, {name: chosen[name] for name in names[:2]}, "template")
    faults += run_ranks(nest_faults, 4, OP, {"cannon": chosen["cannon"]}, "direct")
    faults += run_ranks(nest_faults, 4, SEQUENCE, {names[3]: chosen[names[3]]}, "template")
    assert not any(faults)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
def test_all_compute_the_product(path: str):
    for op in (OP, SEQUENCE):
        for one in (2, 3, 4):
            for ranks, found in by_ranks(op, one).items():
                assert not any(run_ranks(nest_faults, ranks, op, found, path, timeout_s=300))


def test_shifts_pass_blocks_between_neighbours():
    ring = lowered("ring")
    puts = [each for each in ring.schedule.operations if isinstance(each, Put)]
    assert {(each.rank - each.peer) % 4 for each in puts} == {1}
    assert len(puts) == 4 * 3
    back = [each for each in lowered("ring_back").schedule.operations if isinstance(each, Put)]
    assert {(each.rank - each.peer) % 4 for each in back} == {3}


def test_what_is_kept_nowhere_is_pulled():
    assert count(lowered("pulled"), Get) == count(lowered("ring"), Put) == 4 * 3
    assert count(lowered("pulled"), Put) == 0
    summa = lowered("summa", 2)
    assert count(summa, Get) == 4 * 2  # of each factor the block that is not the rank's own


def test_what_is_kept_above_all_loops_is_gathered_level_by_level():
    found = lowered("two_level_gather", 2, "direct")
    assert [str(step) for step in found.steps] == [
        "x: all_gather among (0, 1) (2, 3)",
        "x: all_gather among (0, 2) (1, 3)",
    ]
    assert {each.ranks for each in found.schedule.operations if isinstance(each, Collective)} == {
        (0, 1),
        (2, 3),
        (0, 2),
        (1, 3),
    }


def test_a_double_ring_turns_inside_before_it_steps_across():
    found = lowered("double_ring", 4)
    steps = {each.groups[0] for each in found.steps}
    inside = {(one, other) for one, other in steps if one // 2 == other // 2}
    assert len(inside) == 8
    assert {(other - one) % 8 for one, other in steps - inside} == {6}
    assert count(found, Compute) == 8 * 8


def test_cannon_skews_then_passes():
    found = lowered("cannon")
    assert count(found, Get) == 2 * 2  # one block of a row, and one of a column, begin elsewhere
    assert count(found, Put) == 2 * 2  # their second block is at home
    assert count(found, Compute) == 4 * 2


def test_a_sum_over_steps_is_rounded_once():
    mesh, words = matmuls(4)["weight_ring"]
    found = loops(Nest(MatmulOp(24, 24, 24, "bfloat16"), words), mesh=mesh)
    assert {each.name: each.dtype for each in found.schedule.buffers}["y.part"] == "float32"
    assert {each.terms for each in found.schedule.goal if each.region.rank == 1} == {
        ((6, 12), (12, 18), (18, 24), (0, 6))
    }
