"""What a kernel promises to the lint, and what the lint reports.

A contract names the kernel's pointer arguments, as they stand in its signature. `*table` names what the entries of a
table of addresses point to. Example, a matmul that waits for its rows and announces its tiles:

    Contract(
        waits=1, releases=1, wgmma=True, depth=1,
        guarded=(Guard("signals", ("a_workspace",), optional=True),),
        announced=(Guard("signals", ("out",), optional=True),),
        alarm=("words", "*limits"), claims=("claims",),
    )
"""

from __future__ import annotations

from msgspec import Struct


class Guard(Struct, frozen=True):
    """A signal and the data it stands for: data is read after the signal was acquired, or written before its release.

    optional: the kernel may find that there is nothing to wait for, or nobody to tell (a table says so); then the
    decision stands for the wait. Without it, a path around the wait or the release is a finding.
    """

    signal: str
    data: tuple[str, ...]
    optional: bool = False


class Packed(Struct, frozen=True):
    """Messages that carry their flag: where they lie, how many stores push one, and how many loads look for one."""

    at: tuple[str, ...]
    pushes: int
    looks: int


class Contract(Struct, frozen=True, kw_only=True):
    """What the PTX must show.

    waits: spins on a guarded signal. releases: releases of an announced signal. Both as the source says; a compiler may
    unroll the loop around them into `unrolls` copies (each number is allowed, beside 1).
    looks: acquires of a guarded signal that are no waits (a report reads the word once more).
    guarded, announced: see Guard.
    alarm: where abort words, reports and peers' abort words lie; a spin must watch one of them if any is named.
    claims: counters from which a block takes its next tile: there its next turn begins, whatever was waited for before.
    claims_ahead: the block claims its next tile before it announces this one, so that the release is not waited for.
    counted: a counter and the shares that blocks of this device leave for whoever counts last.
    private: words that only blocks of this device touch, claims aside: any scope will do, nobody is told anything.
    packed: messages in memory that no signal guards.
    wgmma: tensor cores of Hopper are used; depth: how many of their groups stay in flight in the innermost loop.
    """

    waits: int = 0
    releases: int = 0
    unrolls: tuple[int, ...] = ()
    looks: int = 0
    guarded: tuple[Guard, ...] = ()
    announced: tuple[Guard, ...] = ()
    alarm: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    claims_ahead: bool = False
    counted: tuple[Guard, ...] = ()
    private: tuple[str, ...] = ()
    packed: Packed | None = None
    wgmma: bool = False
    depth: int = 0

    @property
    def names(self) -> frozenset[str]:
        """Every argument the contract speaks of, tables without their star."""
        guards = (*self.guarded, *self.announced, *self.counted)
        pairs = (name for guard in guards for name in (guard.signal, *guard.data))
        packed = self.packed.at if self.packed else ()
        return frozenset(name.lstrip("*") for name in (*pairs, *self.alarm, *self.claims, *self.private, *packed))


class Finding(Struct, frozen=True):
    """A rule that a kernel breaks. line: of the PTX, 0 if the kernel as a whole. source: `file.py:line`, or empty."""

    kernel: str
    config: str
    rule: str
    line: int
    source: str
    what: str
    cure: str

    def __str__(self) -> str:
        place = f"ptx:{self.line}" + (f" ({self.source})" if self.source else "") if self.line else "whole kernel"
        return f"{self.kernel} [{self.config}] {self.rule} at {place}: {self.what}. {self.cure}."
