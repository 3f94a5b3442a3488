"""Placements before and behind: proven for every number of ranks, by every path, and bit for bit what DTensor makes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from campaigns.choices.joined_machines import scattered_pairs
from overweave.hardware.machine import load
from overweave.ir.schedule import Collective, Compute, Get, Put, Reduce
from overweave.ir.verify.plan import verify_schedule
from overweave.lower import Attention, Matmul, Mesh, placements
from overweave.sim.simulate import total_us
from tests.lower.cases import ATTENTION, ATTENTION_TWO, ONE, PATHS, TWO, Pair, cases
from tests.lower.emulated import attention_faults, matmul_faults
from tests.ranks import run_ranks

OP, SEQUENCE = Matmul(24, 24, 24, "float32"), Attention(4, 8, 24, 2, "float32")
SHAPES = ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))


def lowered(pair: Pair, shape: tuple[int, ...], path: str, op: Any = OP) -> Any:
    names = ("x", "w") if len(pair) == 3 else ("q", "k", "v")
    inputs = {name: each.split() for name, each in zip(names, pair, strict=False)}
    return placements(op, inputs=inputs, outputs=pair[-1].split(), mesh=Mesh(shape), path=path)  # type: ignore[arg-type]


def sized(ranks: int, pair: Pair = ONE[0]) -> Matmul | Attention:
    """Of sizes that the ranks divide."""
    if len(pair) == 3:
        return Matmul(ranks * 6, ranks * 6, ranks * 6, "float32")
    return Attention(ranks, ranks, ranks * 2, 2, "float32")


def test_there_are_enough_pairs():
    assert len({*ONE, *TWO, *ATTENTION, *ATTENTION_TWO}) >= 60


@pytest.mark.parametrize("path", PATHS)
def test_pairs_are_proven(path: str):
    """A plan that is not proven is not returned. Each number of ranks takes another seventh of the pairs."""
    for ranks in range(2, 9):
        for pair in ONE[ranks % 7 :: 14]:
            lowered(pair, (ranks,), path, sized(ranks))
    for at, pair in enumerate(TWO[::2]):
        shape = SHAPES[at % len(SHAPES)]
        lowered(pair, shape, path, sized(shape[0] * shape[1]))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_all_pairs_are_proven(path: str, ranks: int):
    for pair in (*ONE, *ATTENTION):
        lowered(pair, (ranks,), path, sized(ranks, pair))
    for shape in (shape for shape in SHAPES if shape[0] * shape[1] == ranks):
        for pair in (*TWO, *ATTENTION_TWO):
            lowered(pair, shape, path, sized(ranks, pair))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_few_are_what_dtensor_makes(path: str):
    at = PATHS.index(path)
    faults = run_ranks(matmul_faults, 2, (2,), OP, cases(ONE[at::12], path))
    faults += run_ranks(matmul_faults, 4, (2, 2), OP, cases(TWO[at::9], path))
    faults += run_ranks(attention_faults, 2, (2,), SEQUENCE, cases(ATTENTION[at::3], path))
    assert not any(faults)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
def test_all_are_what_dtensor_makes(path: str):
    faults = run_ranks(matmul_faults, 2, (2,), OP, cases(ONE, path), timeout_s=300)
    faults += run_ranks(matmul_faults, 3, (3,), OP, cases(ONE[::3], path), timeout_s=300)
    faults += run_ranks(matmul_faults, 4, (2, 2), OP, cases(TWO, path), timeout_s=300)
    faults += run_ranks(matmul_faults, 8, (2, 4), OP, cases(TWO[::4], path), timeout_s=300)
    faults += run_ranks(attention_faults, 2, (2,), SEQUENCE, cases(ATTENTION, path), timeout_s=300)
    faults += run_ranks(attention_faults, 4, (2, 2), SEQUENCE, cases(ATTENTION_TWO, path), timeout_s=300)
    assert not any(faults)


def kinds(plan: Any) -> set[type]:
    return {type(operation) for operation in plan.schedule.operations}


def test_a_path_says_who_moves():
    for pair in (("S0", "S1", "S1"), ("S1", "S0", "S0"), ("S1", "S0", "R")):
        assert Collective in kinds(lowered(pair, (4,), "direct").plan)
        for path in ("template", "synth"):
            found = kinds(lowered(pair, (4,), path).plan)
            assert Put in found
            assert Collective not in found
            assert Get not in found


def test_the_fewest_bytes_move():
    assert [step.kind for step in lowered(("S2", "S2", "S2", "S2"), (4,), "template", SEQUENCE).steps] == [
        "all_to_all"
    ] * 4
    assert [str(step) for step in lowered(("S0 R", "S0 S1", "S0 S1"), (2, 2), "direct").steps] == [
        "w: all_gather among (0, 2) (1, 3)"
    ]
    assert not lowered(("R", "S1", "S1"), (2,), "direct").steps
    assert [step.kind for step in lowered(("S1", "S0", "R"), (2,), "direct", Matmul(4, 4, 4096, "float32")).steps] == [
        "all_reduce"
    ]


def test_operators_serve_what_they_can():
    whole = Matmul(64, 64, 64, "float32")
    words = {pair: lowered(pair, (4,), "template", whole).words for pair in ONE}
    assert words.pop(("S0", "S1", "S1")) == ("all_gather_matmul", "push")
    assert words.pop(("S1", "S0", "S0")) == ("matmul_reduce_scatter", "scatter")
    assert words.pop(("S1", "S0", "R")) == ("matmul_all_reduce", "two_shot")
    assert set(words.values()) == {None}
    assert lowered(("S0", "S1", "S1"), (4,), "synth", whole).words == ("all_gather_matmul", "synth links=h200x4")
    assert lowered(("S0", "S1", "S1"), (4,), "direct", Matmul(24, 22, 24, "float32")).fused is None


def test_slices_are_summed_beside_the_next_product():
    """Domino: the library's sum of one slice does not wait for the product of another, which is launched before it."""
    op = replace(OP, slices=(2, 2))
    plan = placements(op, inputs={"x": "S1", "w": "S0"}, outputs="R", mesh=2, path="direct").plan
    sums = [each for each in plan.schedule.of_rank(0) if isinstance(each, Collective)]
    products = [each for each in plan.schedule.of_rank(0) if isinstance(each, Compute)]
    assert len(sums) == len(products) == 4
    assert len({each.waits for each in sums}) == 4
    assert {each.queue for each in sums}.isdisjoint(each.queue for each in products)
    whole = Matmul(8192, 8192, 8192)
    args: Any = {"inputs": {"x": "S1", "w": "S0"}, "outputs": "R", "mesh": 4, "path": "direct"}
    at_once, sliced = (placements(one, **args).plan for one in (whole, replace(whole, slices=(2, 2))))
    assert total_us(sliced, load("h200x4")) < total_us(at_once, load("h200x4"))


def test_a_machine_decides_the_ways():
    pair = ("S0", "S1", "S1")
    inputs: Any = {"x": pair[0], "w": pair[1]}
    found = placements(OP, inputs=inputs, outputs=pair[2], mesh=Mesh((8,), scattered_pairs()), path="synth")
    puts = [each for each in found.plan.schedule.operations if isinstance(each, Put)]
    assert {(each.rank, each.peer) for each in puts} != {(a, b) for a in range(8) for b in range(8) if a != b}
    assert found.words is None  # no machine of the package has such links


def test_a_sum_without_one_part_is_refused():
    """The proof follows every part of the reduced axis."""
    schedule = lowered(("S1", "S0", "S0"), (3,), "template").plan.schedule
    short = tuple(
        replace(each, operands=each.operands[:-1]) if isinstance(each, Reduce) else each for each in schedule.operations
    )
    assert not verify_schedule(replace(schedule, operations=short)).ok
