"""Communication and matmul woven: tiles counted, one launch per issue queue, credits where peers meet."""

from __future__ import annotations

from overweave.ir.plan import MatmulConfig
from overweave.ir.schedule import Buffer, Compute, Queue
from overweave.schedules.catalog.compose import MatmulFootprint, compose
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import Reduction
from overweave.schedules.moves.reduction import Placing, reduced
from overweave.schedules.moves.reduction_templates import ReductionTemplate, straight


def woven(is_fused: bool):
    moves = Reduction(2, tuple(straight(ReductionTemplate(Mesh(rows=96, cols=40, world_size=2)))))
    how = Placing(by_library=not is_fused, are_behind=True)
    communication = reduced(moves, (96, 40), ((0, 8), (8, 16)), {}, how)
    kernel = MatmulFootprint(
        queue=Queue("tiles", "issue", after=("main",)) if is_fused else Queue("main", "complete"),
        a=Buffer("x", 96, 8, "input"),
        b=Buffer("w", 8, 40, "input"),
        out=None,
        config=MatmulConfig(block_m=16, block_n=32) if is_fused else None,
        given=(),
    )
    return compose("woven", communication, kernel)


def test_waits_count_the_tiles_of_their_chunk():
    schedule = woven(is_fused=True)
    compute, put = (next(op for op in schedule.of_rank(0) if op.queue == queue) for queue in ("tiles", "copies"))
    assert isinstance(compute, Compute)
    assert compute.tiles == 3 * 2
    assert put.waits[0].count == 6
    assert schedule.queues[0].after == ()


def test_an_issue_queue_is_one_launch_and_library_matmuls_stay_where_they_are_needed():
    fused, library = ([op.queue for op in woven(kind).of_rank(0)] for kind in (True, False))
    assert fused == ["tiles", "tiles", "copies", "sums"]
    assert library == ["main", "copies", "main", "main"]


def test_peers_that_meet_in_the_workspace_exchange_credits():
    assert {(credit.giver, credit.taker) for credit in woven(is_fused=True).credits} == {(0, 1), (1, 0)}
