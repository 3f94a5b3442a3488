"""The contract of a kernel with the PTX lint, and the lint's findings.

A contract names the kernel's pointer arguments as in its signature. `*table` names the memory that the entries of a
table of addresses point to. Example, a matmul that waits for its rows and notifies for its tiles:

    Contract(
        waits=1, releases=1, wgmma=True, depth=1,
        guarded=(Guard("signals", ("a_workspace",), optional=True),),
        announced=(Guard("signals", ("out",), optional=True),),
        alarm=("words", "*limits"), claims=("claims",),
    )
"""

from __future__ import annotations

from msgspec import Struct

from overweave.compiler.emit.emit import FusionOptions
from overweave.compiler.frontend.source.kernel import AnnotatedKernel


class Guard(Struct, frozen=True):
    """A signal and the data that it guards: read behind the acquire of the signal, or written before its release.

    optional: a table may say that a tile waits for nothing, or notifies nobody; a branch on that entry then stands for
    the wait or the release. Otherwise a path around the wait or the release is a finding.
    """

    signal: str
    data: tuple[str, ...]
    optional: bool = False


class Packed(Struct, frozen=True):
    """LL-protocol messages, data and flag in one word. at: their pointers. pushes, looks: stores, loads of one."""

    at: tuple[str, ...]
    pushes: int
    looks: int


class Contract(Struct, frozen=True, kw_only=True):
    """What the PTX must show.

    waits: spin loops on a guarded signal. releases: releases of an announced signal. Both as in the source; the
    compiler may unroll the loop around them into any of `unrolls` copies.
    looks: acquires of a guarded signal outside a wait (a timeout report reads the word once more).
    guarded, announced: signals that are waited for, and that are released; see Guard.
    alarm: the memory of abort words, timeout reports and peers' abort words; a spin loop must poll one of them.
    claims: the work counters from which a CTA claims its next tile; a claim ends the effect of earlier waits.
    claims_ahead: the CTA claims its next tile before it releases this one's signal.
    counted: a counter, and the partial results of split tiles that the last CTA to count reads.
    private: words that only CTAs of this device access, work counters aside: any scope will do.
    packed: LL-protocol messages, which no signal guards.
    wgmma: Hopper's tensor cores are used; depth: how many wgmma groups stay in flight in the innermost loop.
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
        """The names of all arguments in the contract, tables without their star."""
        guards = (*self.guarded, *self.announced, *self.counted)
        pairs = (name for guard in guards for name in (guard.signal, *guard.data))
        packed = self.packed.at if self.packed else ()
        return frozenset(name.lstrip("*") for name in (*pairs, *self.alarm, *self.claims, *self.private, *packed))


class Finding(Struct, frozen=True):
    """A rule that a kernel breaks. line: of the PTX, 0 for the whole kernel. source: `file.py:line`, or empty."""

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


def contract_of(kernel: AnnotatedKernel, options: FusionOptions, tensor_cores: int = 0) -> Contract:
    """Return what the PTX must show: exactly the emitted waits, before their loads, and notifies, behind their stores.

    tensor_cores: how many wgmma groups stay in flight in the main loop; 0 for a kernel without them.
    """
    streamed = {axis.name for axis in kernel.axes if axis.is_streamed}
    late = [load.directive for load in kernel.loads if load.directive.dims[0].names & streamed]
    waited_loads = [load.directive for load in kernel.loads if load.directive.tensor in options.waited_tensors]
    early = [
        f"overweave_{load.parameter}" if load.tensor == options.dual_source else load.parameter for load in waited_loads
    ]
    guarded = dict.fromkeys(early + [load.parameter for load in late if options.waits_in_loop])
    stored_pointers = dict.fromkeys(store.directive.parameter for store in kernel.stores)
    waits = bool(options.waited_tensors) + options.waits_in_loop
    signals = "*overweave_places" if options.stored_at_peers else "overweave_signals"
    return Contract(
        waits=waits,
        releases=bool(options.notifies) + bool(options.push_path),
        looks=waits,
        guarded=(Guard("overweave_signals", tuple(guarded), optional=True),) if waits else (),
        announced=(
            *((Guard(signals, tuple(stored_pointers), optional=True),) if options.notifies else ()),
            *((Guard("*overweave_targets", ("*overweave_targets",), optional=True),) if options.push_path else ()),
        ),
        alarm=("overweave_words", "*overweave_limits"),
        claims=("overweave_claims",),
        wgmma=bool(tensor_cores),
        depth=tensor_cores,
    )
