"""Back ends of single moves in lists by hand: mixed, proven, each wait missed; others refused with their reasons."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import overweave as ow
from campaigns.oracle.fewer_waits import is_proven, without_one_wait
from overweave.errors import InputError, OverweaveError, ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Put
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.communication import PUSHES
from overweave.schedules.moves.moves import MOVERS, settled
from overweave.schedules.weave.author_plan import author_plan
from tests.plans import with_operations
from tests.tile_spaces import BLOCK, matmul

ROWS, COLS = 4 * BLOCK, 64


def rows(lo: int, hi: int) -> ow.Chunk:
    return ow.Chunk((lo, hi))


def gather(*movers: str) -> ow.Gather:
    """Rank 0's rows to both peers by one back end, rank 1's by another, rank 2's are pulled."""
    own = [rows(0, 32), rows(32, 64), rows(64, 96)]
    pushes = [ow.Put(rank, peer, own[rank], mover=movers[rank]) for rank in (0, 1) for peer in range(3) if peer != rank]
    return ow.Gather(3, (*pushes, ow.Get(0, 2, own[2]), ow.Get(1, 2, own[2])), copy_programs=4)


def reduction(*movers: str) -> ow.Reduction:
    """Every partial straight to its owner, those of a rank by a back end of its own."""
    moves = [
        ow.Put(rank, owner, rows(32 * owner, 32 * owner + 32), mover=movers[rank])
        for step in (1, 2)
        for rank in range(3)
        for owner in [(rank + step) % 3]
    ]
    return ow.Reduction(3, tuple(moves), copy_programs=8)


def planned(how: ow.Gather | ow.Reduction) -> Plan:
    tensor = "A" if isinstance(how, ow.Gather) else "C"
    plan = author_plan(matmul(96, n=COLS, k=COLS), {tensor: how}, how.world_size, "bfloat16", dual_source="A")
    verify_plan(plan, MachineLimits()).raise_if_refused()
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("other", ["copy_engine", "copy_kernel", "bulk_kernel", "tiles", "bulk_tiles"])
def test_moves_of_a_gather_may_be_carried_by_different_back_ends(other: str):
    plan = planned(gather("copy_engine", other))
    queues = {one.peer: one.queue for one in plan.schedule.of_rank(1) if isinstance(one, Put)}
    expected = {"copy_engine": "copies", "copy_kernel": PUSHES, "bulk_kernel": PUSHES}.get(other, "tiles")
    assert queues == {0: expected, 2: expected}
    assert not any(map(is_proven, without_one_wait(plan)))


@pytest.mark.slow
@pytest.mark.parametrize("other", ["copy_kernel", "bulk_kernel", "tiles"])
def test_moves_of_a_reduction_may_be_carried_by_different_back_ends(other: str):
    plan = planned(reduction("copy_engine", other, other))
    assert not any(map(is_proven, without_one_wait(plan)))
    assert any(isinstance(one, Put) for one in plan.schedule.of_rank(0))
    assert any(isinstance(one, Put) for one in plan.schedule.of_rank(1)) == (other != "tiles")
    config = plan.realization.copy
    assert (config.programs if config else 8) == 8


@pytest.mark.parametrize("mover", [mover for mover in MOVERS if mover != "copy_engine"])
def test_what_a_kernel_carries_is_told_to_its_peer_alone(mover: str):
    """Rank 2 fetches from rank 1 what rank 0 has pushed there; or waits for it before it pushes to another."""
    own = [rows(0, 32), rows(32, 64), rows(64, 96)]
    rest = [ow.Put(rank, peer, own[rank]) for rank in (1, 2) for peer in range(3) if peer != rank]
    first = ow.Put(0, 1, own[0], mover=mover)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"ranks \[1, 2\] wait for it, and kernels tell the peer alone"):
        planned(ow.Gather(3, (first, ow.Get(2, 1, own[0]), *rest)))
    if mover in ("copy_kernel", "bulk_kernel"):
        to = [ow.Put(rank, owner, own[owner]) for owner in range(3) for rank in range(3) if rank != owner]
        late = replace(to[-2], mover=mover), replace(to[0], after=((to[-2].rank, 0),))
        with pytest.raises(ScheduleError, match="kernels tell the peer alone"):
            planned(ow.Reduction(3, (*late, *to[1:-2], to[-1])))


def staged(m: int) -> ow.Gather:
    """Tiles push one half of rank 0's rows, the other half is pulled, so that its shard is copied where peers reach."""
    half, whole = m // 4, m // 2
    moves = (
        ow.Put(0, 1, rows(0, half), mover="tiles"),
        ow.Get(1, 0, rows(half, whole)),
        ow.Get(0, 1, rows(whole, m)),
    )
    return ow.Gather(2, moves)


@pytest.mark.parametrize(("m", "chosen"), [(100, "A"), (4 * BLOCK, None)])
def test_tiles_carry_from_where_a_shard_was_copied_for_peers(m: int, chosen: str | None):
    """The kernel has no pointer to the caller's shard, as no tile reads it there."""
    plan = author_plan(matmul(m, n=COLS, k=COLS), {"A": staged(m)}, 2, "bfloat16", dual_source=chosen)
    verify_plan(plan, MachineLimits()).raise_if_refused()
    (put,) = (one for one in plan.schedule.operations if isinstance(one, Put))
    assert [(one.buffer, one.rows) for one in put.sources] == [("A.gathered", (0, m // 4))]
    astray = replace(put, sources=tuple(replace(one, buffer="A") for one in put.sources))
    operations = tuple(astray if one is put else one for one in plan.schedule.operations)
    broken = with_operations(plan, operations)
    refusals = verify_plan(broken, MachineLimits()).refusals
    assert any("which none of them reads there" in refusal.message for refusal in refusals)


def test_tiles_carry_from_the_callers_shard_where_they_read_it_there():
    plan = author_plan(matmul(4 * BLOCK, n=COLS, k=COLS), {"A": staged(4 * BLOCK)}, 2, "bfloat16", dual_source="A")
    verify_plan(plan, MachineLimits()).raise_if_refused()
    (put,) = (one for one in plan.schedule.operations if isinstance(one, Put))
    assert [(one.buffer, one.rows) for one in put.sources] == [("A", (0, BLOCK))]


def test_sums_of_what_counts_differently_run_behind_the_tiles():
    """A row of their table can tell one range and one signal: with the own tiles', two kinds of arrivals are more."""
    for movers, after in ((("copy_engine", "tiles", "tiles"), ("tiles",)), (("tiles", "tiles", "tiles"), ())):
        queues = {queue.name: queue.after for queue in planned(reduction(*movers)).schedule.queues}
        assert queues["sums"] == after


def test_what_is_left_open_is_settled_for_puts():
    opened = gather("auto", "tiles")
    assert {move.mover for move in settled(opened, "bulk_kernel").moves[:2]} == {"bulk_kernel"}
    assert settled(gather("copy_engine", "tiles"), "bulk_kernel") == gather("copy_engine", "tiles")
    with pytest.raises(ScheduleError, match="only compile_auto chooses"):
        planned(opened)


@pytest.mark.parametrize("mover", [mover for mover in MOVERS if mover != "copy_engine"])
def test_what_cannot_be_carried_is_refused_with_its_reason(mover: str):
    first = (ow.Put(0, 1, rows(0, 48)), ow.Put(1, 0, rows(48, 96)))
    wrong: dict[str, ow.Put | ow.Get] = {
        "has to arrive first": ow.Put(1, 2, rows(0, 32), mover=mover),
        "waits for nothing": ow.Get(2, 0, rows(0, 32), mover=mover),
        "move whole rows": ow.Put(0, 1, ow.Chunk((0, 48), (0, 8)), mover=mover),
        "comes after another": replace(first[1], mover=mover, after=((0, 0),)),
    }
    for found, move in wrong.items():
        ranks = 3 if isinstance(move, ow.Get) or move.peer == 2 else 2
        before = (ow.Put(0, 1, rows(0, 32)),) if ranks == 3 else first[:1] if move.rank == 1 else ()
        with pytest.raises(ScheduleError, match=found):
            planned(ow.Gather(ranks, (*before, move)))
    low, high = rows(0, 48), rows(48, 96)
    sent = (ow.Put(0, 1, high), ow.Put(1, 0, low), ow.Sum(1, high), ow.Sum(0, low), ow.Put(0, 1, low))
    with pytest.raises(ScheduleError, match="has to arrive first"):
        planned(ow.Reduction(2, (*sent, replace(first[1], mover=mover)), everywhere=True))


def test_a_chunk_that_others_read_too_is_not_stored_away():
    moves = [ow.Put(rank, 1 - rank, rows(0, 96), mover="tiles") for rank in (0, 1)]
    with pytest.raises(ScheduleError, match="others read what it carries too"):
        planned(ow.Reduction(2, tuple(moves), everywhere=True))
    with pytest.raises(ScheduleError, match="stored from registers"):
        planned(reduction("bulk_tiles", "copy_engine", "copy_engine"))


def test_one_kernel_moves_chunks():
    with pytest.raises(InputError, match="One kernel moves chunks"):
        planned(gather("copy_kernel", "bulk_kernel"))
    with pytest.raises(OverweaveError):
        planned(gather("tiles", "bulk_tiles"))


@pytest.mark.parametrize(
    "write",
    [
        lambda: gather("by_magic", "tiles"),
        lambda: reduction("tiles", "tiles", 3),  # type: ignore[arg-type]
        lambda: ow.Gather(2, (), copy_programs=0),
        lambda: ow.Reduction(2, (), copy_programs=1000),
    ],
)
def test_what_is_no_back_end_is_refused_as_it_is_written(write):
    with pytest.raises(InputError):
        write()
