"""Passes: what each makes of a small schedule (golden), and that what it makes of any is proven."""

from __future__ import annotations

import pytest

from overweave.errors import InputError
from overweave.ir.operators.registry import operator_of
from overweave.ir.passes import inject_delay, reorder, rotate, split
from overweave.ir.problem import Problem
from overweave.ir.schedule import Copy, Schedule
from overweave.ir.text.printed import to_text
from overweave.ir.verify.schedule import verify_schedule
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import METHODS

DELAYED = "push.1-0.0"
TWO_SHOTS = ("matmul_all_reduce.two_shot", "matmul_all_reduce.ring_stored")


def schedule(name: str = "all_gather_matmul.push", world_size: int = 2, pieces: int = 1) -> Schedule:
    rows = operator_of(name.split(".")[0]).whole_rows(8 * world_size + 3, world_size)
    fields = {"m": rows, "n": 8, "k": 4, "dtype": "float32"}
    asked = {"pieces": pieces} if any(option.name == "pieces" for option in METHODS[name].options) else {}
    return build(name, Problem(operator=name.split(".")[0], world_size=world_size, **fields), asked, rank=0).schedule


PASSES = {
    "split": lambda s: split(s, 2),
    "rotate": lambda s: rotate(s, "tiles", turns=-1),
    "reorder": lambda s: reorder(s, 0, "tiles", ["multiply.0-1.0", "multiply.0.own"]),
    "inject_delay": lambda s: inject_delay(s, 1, DELAYED, 500),
}


@pytest.mark.parametrize("name", PASSES)
def test_before_and_after(golden, name: str):
    before = schedule()
    after = PASSES[name](before)
    golden(f"passes/{name}.txt", f"before\n\n{to_text(before)}\nafter {name}\n\n{to_text(after)}")
    assert after != before
    assert verify_schedule(after).ok


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 8))])
@pytest.mark.parametrize("name", names())
def test_what_is_proven_stays_proven(name: str, world_size: int):
    before = schedule(name, world_size, pieces=2)
    for queue in before.queues:
        if name.endswith((".fused_ring", "_stored")):
            continue  # tiles add what those of other ranks, earlier in this order, made
        if queue.order == "issue" and not (queue.name == "sums" and name in TWO_SHOTS) and queue.name != "packed":
            # Of two-shots, moves wait for own sums; a packed queue pushes before it sums.
            assert verify_schedule(rotate(before, queue.name, turns=3)).ok
    assert verify_schedule(split(before, 3)).ok
    assert verify_schedule(split(before, 2, alignment=4)).ok
    complete = {queue.name for queue in before.queues if queue.order == "complete"}
    moves = [operation for operation in before.operations if operation.queue in complete]
    for move in moves[-1:]:
        assert verify_schedule(inject_delay(before, move.rank, move.name, 10)).ok


def test_a_rotation_taken_back_begins_with_shard_nought_everywhere():
    plain = rotate(schedule(world_size=4), "tiles", turns=-1)
    for rank in range(4):
        rows = [op.writes[0].rows[0] for op in plain.of_rank(rank) if op.queue == "tiles"]
        assert rows == sorted(rows)
    assert rotate(plain, "tiles") == schedule(world_size=4)


def test_a_reordering_that_waits_for_itself_is_refused_by_verify():
    before = schedule("matmul_reduce_scatter.fused_ring", 3)
    names = [op.name for op in before.of_rank(0) if op.queue == "tiles"]
    assert not verify_schedule(reorder(before, 0, "tiles", names[::-1])).ok


def test_splitting_signals_each_piece_once():
    before, after = schedule(world_size=3), split(schedule(world_size=3), 4)
    assert after.pad("arrived").size == 4 * before.pad("arrived").size
    sent = [notify for op in after.operations for notify in op.notifies]
    assert len(set(sent)) == len(sent) == 4 * sum(len(op.notifies) for op in before.operations)


def test_a_delay_is_a_copy_of_nothing_before_its_operation():
    after = list(PASSES["inject_delay"](schedule()).of_rank(1))
    at = [op.name for op in after].index(DELAYED)
    rest = after[at - 1]
    assert isinstance(rest, Copy)
    assert (rest.delay_us, rest.queue, rest.sources, rest.waits) == (500, after[at].queue, (), ())


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda s: split(s, 0), "less than one"),
        (lambda s: rotate(s, "tilse"), "Queues: tiles, copies"),
        (lambda s: reorder(s, 0, "tilse", []), "Queues: tiles, copies"),
        (lambda s: reorder(s, 0, "tiles", ["multiply.0.own"]), "1 names for 2 operations"),
        (lambda s: reorder(s, 0, "tiles", ["multiply.0.own"] * 2), "2 names for 2 operations, or other ones"),
        (lambda s: inject_delay(s, 0, DELAYED, 5), "0 operations of that name"),
        (lambda s: inject_delay(s, 1, DELAYED, -5), "-5 us"),
        (lambda s: inject_delay(s, 0, "multiply.0.own", 5), "starts its operations at once"),
    ],
)
def test_what_a_pass_cannot_do_is_said(wrong, found: str):
    with pytest.raises(InputError) as caught:
        wrong(schedule())
    assert found in str(caught.value)
