"""A schedule by hand: two ranks swap a matrix. Print it, prove it, break it, and read why it is refused.

python examples/02_schedule_by_hand.py
"""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.schedule import (
    Buffer,
    Copy,
    Credit,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Put,
    Queue,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.text.parse import to_text
from overweave.ir.verify.plan import verify_schedule

RANKS = (0, 1)
ROWS, COLS = 64, 128


def whole(buffer: str, rank: int) -> Region:
    return Region(buffer, rank, (0, ROWS), (0, COLS))


def push(rank: int) -> Operation:
    """Writes the own `x` into the peer's slot and, when it is there, signals the peer."""
    peer = 1 - rank
    return Put(
        name=f"push.{rank}",
        rank=rank,
        queue="copies",
        notifies=(Notify("arrived", peer, 0),),
        sources=(whole("x", rank),),
        destinations=(whole("slot", peer),),
    )


def take(rank: int) -> Operation:
    """Waits for the peer's matrix and hands it to the caller."""
    return Copy(
        name=f"take.{rank}",
        rank=rank,
        queue="main",
        waits=(Wait("arrived", (0, 1), 1),),
        sources=(whole("slot", rank),),
        destinations=(whole("y", rank),),
    )


def swap() -> Schedule:
    """`given` says what is where at the start, `goal` what must be where at the end: that is what is proven."""
    return Schedule(
        name="swap",
        world_size=2,
        buffers=(
            Buffer("x", ROWS, COLS, "input"),
            Buffer("slot", ROWS, COLS, "symmetric"),  # in the workspace: peers may write it
            Buffer("y", ROWS, COLS, "output"),
        ),
        pads=(SignalPad("arrived", 1),),
        queues=(Queue("copies", "complete"), Queue("main", "complete")),
        credits=(Credit(0, 1), Credit(1, 0)),  # nobody writes a slot before its owner is done with the last call
        given=tuple(InitialContents(whole("x", rank), "a", ROWS * rank, 0) for rank in RANKS),
        goal=tuple(Goal(whole("y", rank), "a", ROWS * (1 - rank), 0) for rank in RANKS),
        operations=(push(0), push(1), take(0), take(1)),
    )


def broken(schedule: Schedule) -> dict[str, Schedule]:
    """Three slips that would pass many tests and then, one day, not."""
    impatient = replace(take(0), waits=())
    without_credit = replace(schedule, credits=(Credit(0, 1),))
    take_first = tuple(replace(part, queue="copies") for part in (take(0), take(1), push(0), push(1)))
    return {
        "rank 0 does not wait": replace(schedule, operations=(push(0), push(1), impatient, take(1))),
        "rank 0 gets no credit from rank 1": without_credit,
        "both wait before they push, in one queue": replace(schedule, operations=take_first),
    }


def main() -> None:
    schedule = swap()
    print(to_text(schedule))
    verify_schedule(schedule).raise_if_refused()
    print("proven: no deadlock, no race, every element written once, in this call and the next\n")
    for slip, candidate in broken(schedule).items():
        verdict = verify_schedule(candidate)
        print(f"{slip}: {'proven' if verdict.ok else 'refused'}")
        for refusal in verdict.refusals:
            print(f"    {refusal}")


if __name__ == "__main__":
    main()
