"""What a library's all-to-all orders: a rank's end of it comes behind those that send it something, and no others."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.schedule import Buffer, Collective, Region, Schedule
from overweave.ir.verify.plan import verify_schedule
from tests.ir.two_ranks import RANKS, exchange, put, take


def behind_a_call(sent: tuple[int, int]) -> Schedule:
    """Both ranks push, then call the library, then read what the peer has pushed. sent: rows that each sends there."""
    operations = []
    for rank in RANKS:
        nothing = Region("beside", rank, (0, 0), (0, 4))
        ends = (Region("x", rank, (0, sent[rank]), (0, 4)), Region("beside", rank, (0, sent[1 - rank]), (0, 4)))
        sides = [(nothing, end) if rank == 0 else (end, nothing) for end in ends]
        call = Collective(
            name=f"call.{rank}",
            rank=rank,
            queue="main",
            function="all_to_all",
            label="call",
            ranks=RANKS,
            sources=sides[0],
            destinations=sides[1],
        )
        operations += [put(rank, queue="main", notifies=()), call, take(rank, waits=())]
    made = exchange(*operations, pads=())
    return replace(made, buffers=(*made.buffers, Buffer("beside", 1, 4, "local")))


def test_who_sends_is_waited_for():
    assert verify_schedule(behind_a_call((1, 1))).ok


def test_who_sends_nothing_is_not():
    for sent, late in (((0, 1), 1), ((1, 0), 0)):
        refusals = verify_schedule(behind_a_call(sent)).refusals
        assert refusals
        assert {refusal.rank for refusal in refusals if refusal.rule == "race"} >= {late}, refusals
