"""What is chosen unmeasured, held against tables and result files."""

from __future__ import annotations

from msgspec.structs import replace

from campaigns.choices.cold_choice import Share, shares, verdict
from overweave.ir.problem import Problem
from overweave.tuner.store.cache import Entry, Time

PROBLEM = Problem(operator="all_gather_matmul", m=1024, n=512, k=256, world_size=4, dtype="bfloat16")
TIMES = (
    Time("push", {"mover": "copy_kernel", "copy_programs": 16, "pieces": 1}, 110.0),
    Time("push", {"pieces": 2}, 120.0),
    Time("torch.fused", {}, 100.0),
    Time("sequential", {}, 150.0),
)
ENTRY = Entry(PROBLEM, TIMES)


def judged(choice: str) -> list[Share]:
    return shares([ENTRY], lambda problem: choice)


def test_a_choice_is_held_against_the_quickest_and_against_theirs():
    (share,) = judged("push pieces=2")
    assert (share.share, share.over_theirs) == (100 / 120, 100 / 120)
    (share,) = shares([replace(ENTRY, times=(*TIMES[:2], TIMES[3]))], lambda problem: "push pieces=2")
    assert (share.share, share.over_theirs) == (110 / 120, 150 / 120)


def test_only_pieces_and_tile_shapes_may_differ():
    assert judged("push pieces=4")[0].taken == TIMES[1]
    assert judged("push copy_programs=32 mover=copy_kernel pieces=1")[0].taken == TIMES[0]
    assert judged("push order=all_peers pieces=2") == judged("pull pieces=1") == []


def test_verdicts():
    assert verdict("x", 3, []) == (True, "none  x: no choice for its 3 problems was measured")
    holds, said = verdict("x", 1, judged("push pieces=2"))
    assert not holds
    assert said == "FAIL  x: mean 0.833 of the quickest over 1 of 1; 1 below 0.98 of theirs"
    assert verdict("x", 1, judged("torch.fused"))[0]
