"""The outcome of a proof: proven, or every reason why it was refused."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from overweave.errors import ScheduleRefused, ScheduleUndecided
from overweave.ir.schedule import Operation, Region

VerifyRule = Literal[
    "too_large",  # the proof exceeds its work budget
    "name",  # unknown or duplicate
    "bounds",  # outside of a buffer, a pad or the group
    "form",  # ranges, shapes or counts that make no sense
    "ownership",  # a rank touches what it must not
    "signal",  # a signal that is counted wrongly, never sent or never awaited
    "deadlock",  # a cycle in the most constrained graph
    "race",  # two conflicting accesses without a path between them
    "stale_read",  # a read that is ordered before the write it needs
    "unwritten",  # a read, or a goal, of elements that are never written
    "double_write",  # an element is written twice in one call
    "value",  # an operation on values that do not fit together, or a goal that holds something else
    "contributions",  # a goal lacks a contribution, or has one too often
    "contribution_order",  # a goal's contributions are added in another order
    "reuse",  # the next call on the slot may overtake this one
    "caller_memory",  # a peer touches a caller's tensor outside of that caller's call
    "island",  # a rank reaches for memory or signals of another island, or calls of unlike ranks have no order
    "engine",  # an operation on an engine that cannot run it
    "lowering",  # a tile table that does not match the schedule
    "alignment",  # a row stride that bulk-tensor loads cannot take
    "width",  # a number that exceeds the kernels' 32-bit integers
    "rounding",  # sums of fewer bits than fp32 are added to, though the plan says that none are
    "replay",  # a captured call would do something else when it is replayed
    "residency",  # a kernel that spins on what may never get an SM beside it
    "fault",  # a bug in the verifier: nothing is known of the schedule
]
Outcome = Literal["proven", "refuted", "not decided"]
TOO_LARGE: VerifyRule = "too_large"
FAULT: VerifyRule = "fault"
MOST_REFUSALS = 50


class Refusal(Struct, frozen=True):
    """One reason. operation, rank, region: where it shows, if it is tied to one."""

    rule: VerifyRule
    operation: str | None
    rank: int | None
    region: Region | None
    message: str

    def __str__(self) -> str:
        where = [self.operation] if self.operation is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        where += [str(self.region)] if self.region is not None else []
        return f"[{self.rule}] {', '.join(where)}{': ' if where else ''}{self.message}"


class Verdict(Struct, frozen=True):
    """The outcome for the schedule or plan `name`: without refusals, all is proven but what `notes` say.

    notes: sentences on what the proof does not cover, or allows though bits depend on it. added_to: buffers that hold
    sums of several parts which an operation adds to again: they are rounded to the buffer's dtype before.
    """

    name: str
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    added_to: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        return not self.refusals

    @property
    def outcome(self) -> Outcome:
        """Return `not decided` if its size is the only refusal."""
        if self.ok:
            return "proven"
        return "not decided" if all(refusal.rule == TOO_LARGE for refusal in self.refusals) else "refuted"

    def raise_if_refused(self) -> None:
        """Raise ScheduleRefused with every refusal, if there is any; ScheduleUndecided if size is the only one."""
        if self.refusals:
            kind = ScheduleRefused if self.outcome == "refuted" else ScheduleUndecided
            raise kind(self.name, self.refusals)


class Enough(Exception):
    """MOST_REFUSALS were found: the proof stops."""


class TooMuchWork(Exception):
    """The proof exceeds its work budget (time or memory). The message says of what."""


class WorkBudget:
    """The budget of a pass. what: the subject of the message if the budget is exceeded."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what = most, what
        self.spent = 0

    def spend(self, amount: int) -> None:
        """Spend some of the budget. Raises TooMuchWork if it is exceeded."""
        self.spent += amount
        if self.spent > self.most:
            raise TooMuchWork(f"{self.what}: more than can be followed")


class Findings:
    """The refusals of a proof so far. Raises Enough with the last one there is room for."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.notes: list[str] = []
        self.added_to: set[str] = set()  # as of a Verdict

    def add(self, rule: VerifyRule, operation: Operation | None, message: str, region: Region | None = None) -> None:
        """Add a refusal. region: gives the rank if there is no operation."""
        name, rank = (operation.name, operation.rank) if operation is not None else (None, None)
        if rank is None and region is not None:
            rank = region.rank
        self.refusals.append(Refusal(rule, name, rank, region, message))
        if len(self.refusals) >= MOST_REFUSALS:
            raise Enough

    def verdict(self, name: str) -> Verdict:
        return Verdict(name, tuple(self.refusals), tuple(self.notes), frozenset(self.added_to))
