"""What this rank's last calls were, for comparing with ranks of other islands, whose records come many calls late."""

from __future__ import annotations

from typing import NamedTuple

KEPT = 1 << 14  # calls: at 60 us each, twice as many as are made between two beats of a far rank
_FACTOR, _MASK = 6364136223846793005, (1 << 63) - 1


class Noted(NamedTuple):
    """A call that this rank has made. digest: of all calls up to it, so that one that differed is not forgotten."""

    call: int
    signature: bytes
    digest: int


class History:
    """The last calls of a rank. The thread that calls writes, the courier's reads."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all calls: those that follow are compared among themselves."""
        self._digest = 0
        self._calls: list[tuple[int, bytes, int]] = [(-1, b"", 0)] * KEPT

    def digest_with(self, hash_: int) -> int:
        """Return the digest of the calls so far and of one more. hash_: of its signature."""
        return (self._digest * _FACTOR + hash_) & _MASK

    def add(self, call: int, signature: bytes, hash_: int) -> int:
        """Note a call, and return the digest up to it. Ranks have equal digests where they made the same calls."""
        digest = self._digest = self.digest_with(hash_)
        self._calls[call % KEPT] = call, signature, digest
        return digest

    def find(self, call: int) -> Noted | None:
        """Return a call of this rank; None if it has not made it yet, or forgotten it."""
        noted = self._calls[call % KEPT]
        return Noted(*noted) if noted[0] == call else None
