"""Why a rank gave up a call, as fixed-width fields that fit the board, and the error it becomes on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overweave.errors import OverweaveError, PeerDied, PeerError, PeerTimeout, RankMismatch

FailureKind = Literal["died", "timeout", "mismatch", "failed"]
RULES: tuple[FailureKind, ...] = ("died", "timeout", "mismatch", "failed")
RESET = "then call overweave.reset(group) on every rank"
SAME_CALL = (
    "Call the same operator with the same shapes, dtype and options on every rank; for uneven shards of rows, "
    "pass m=, the rows of all ranks"
)

# rule -> what happened to the peer, the error class, what to do.
_MEANINGS: dict[FailureKind, tuple[str, type[OverweaveError], str]] = {
    "died": ("died", PeerDied, "Find out why its process ended; start the group again"),
    "timeout": ("is late", PeerTimeout, f"Find what holds it up; {RESET}"),
    "mismatch": ("differs", RankMismatch, f"{SAME_CALL}; {RESET}"),
    "failed": ("failed", PeerError, f"See its own error; {RESET}"),
}


@dataclass(frozen=True)
class Alarm:
    """Why a call failed: in `operation`, `peer` (-1: unknown) had counted to `seen` instead of `expected`."""

    rule: FailureKind
    operation: str
    peer: int = -1
    expected: int = -1
    seen: int = -1

    def error(self, group: str, reporter: int, call: int, later: int = 0) -> OverweaveError:
        """Return the error to raise on any rank. reporter: the rank that raised the alarm, in `call`.

        later: the number of the call that raises the error, if that is a later one.
        """
        verb, kind, cure = _MEANINGS[self.rule]
        peer = "a peer" if self.peer < 0 else f"rank {self.peer}"
        counts = "" if self.expected < 0 else f", expected {self.expected}, seen {self.seen}"
        found = f"{peer} {verb}: {self.operation}{counts}"
        if later > call:
            since = f"the group is broken since call {call}, as rank {reporter} saw ({found})"
            return kind(f"make call {later} of group {group}", f"{since}: right calls fail, too", cure)
        return kind(f"call {call} of group {group}, seen by rank {reporter}", found, cure)
