"""A compiled kernel as the rules see it: its graph, its accesses, its waits and its releases, each found once."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.errors import InputError
from tools.aot import Compiled
from tools.ptx_lint.contract import Contract, Finding
from tools.ptx_lint.flow import THREAD, Access, Flow, direct, reaches
from tools.ptx_lint.graph import NOTHING, Facts, Graph, Loop, Spread, facts_before
from tools.ptx_lint.ptx import Edge, Instruction, parse

WARP = 32
POLLED: Facts = frozenset(("polled",))


class Wait(Struct, frozen=True):
    """A spin on a signal.

    polls: the acquires it looks with. seen: exits that depend on what they saw. timed: exits that depend on the clock.
    aborted: exits that depend on an alarm word. blind: exits that depend on none of these.
    done: from these instructions on, every thread of the block may rely on the wait: the polls themselves if every
    thread polls, else the first block barrier after them (empty: there is none).
    """

    loop: Loop
    polls: tuple[Access, ...]
    pointers: Facts
    seen: tuple[Edge, ...]
    timed: tuple[Edge, ...]
    aborted: tuple[Edge, ...]
    blind: tuple[Edge, ...]
    done: tuple[Instruction, ...]

    @property
    def first_poll(self) -> Instruction:
        return self.polls[0].instruction


class Subject:
    """What the rules read.

    shared: the accesses to what is not private. claims: the instructions that take the next tile.
    handovers: in warp-specialised kernels, the arrivals by which partitions that release nothing pass their work on.
    looks: acquires of guarded signals outside any spin that depends on them.
    """

    def __init__(self, compiled: Compiled, contract: Contract) -> None:
        unknown = contract.names - set(compiled.pointers.values())
        if unknown:
            raise InputError(
                f"lint {compiled.name}",
                f"its contract speaks of {sorted(unknown)}, its pointers are {sorted(compiled.pointers.values())}",
                "Name pointer and descriptor arguments as the kernel does",
            )
        self.compiled = compiled
        self.contract = contract
        self.function = next(function for function in parse(compiled.ptx) if function.name == compiled.name)
        self.graph = Graph(self.function)
        self._threads_of: dict[frozenset[int], int] = {}
        self.flow = Flow(self.graph, compiled.pointers)
        self.shared = tuple(access for access in self.flow.accesses if not self.is_private(access))
        self.claims = frozenset(
            access.instruction.index
            for access in self.flow.accesses
            if access.kind == "atomic" and access.pointers and reaches(access.pointers, contract.claims)
        )
        self.releases = tuple(access for access in self.shared if access.is_release)
        self.handovers = tuple(item for item in self.function.instructions if self._hands_over(item))
        self.waits = tuple(self._waits())
        polled = {poll.instruction.index for wait in self.waits for poll in wait.polls}
        self.looks = tuple(
            access
            for access in self.shared
            if access.order == "acquire" and access.instruction.index not in polled and self.is_guard(access)
        )

    def finding(self, rule: str, at: Instruction | None, what: str, cure: str) -> Finding:
        line, source = (at.line, at.source) if at else (0, "")
        return Finding(self.compiled.name, self.compiled.config, rule, line, source, what, cure)

    def is_private(self, access: Access) -> bool:
        names = (*self.contract.private, *self.contract.claims)
        base = direct(access.pointers) or access.pointers  # as in `reaches`
        return bool(base) and base <= {*names, *(f"*{name}" for name in names)}

    def is_guard(self, access: Access) -> bool:
        """Whether it touches the signal of some guard."""
        return reaches(access.pointers, tuple(guard.signal for guard in self.contract.guarded))

    def _hands_over(self, item: Instruction) -> bool:
        """An arrival by which a partition that releases nothing tells another one that its part is done."""
        region = self.graph.partition_of(item)
        if region is None or item.parts[:2] != ("mbarrier", "arrive") or "expect_tx" in item.parts:
            return False
        return not any(self.graph.block_of[release.instruction.index] in region for release in self.releases)

    def is_block_barrier(self, item: Instruction) -> bool:
        """A barrier that every thread takes part in which runs this code: those of the block, or of the partition."""
        if item.root not in ("bar", "barrier") or item.predicate is not None or "arrive" in item.parts:
            return False
        threads = self._threads(self.graph.partition_of(item))
        if "warp" in item.parts:
            return threads == WARP
        return _barrier_threads(item) in (0, threads)

    def _threads(self, partition: frozenset[int] | None) -> int:
        """How many threads run a partition: as many as its widest barrier names, else one warp."""
        if partition is None:
            return self.function.threads
        if partition not in self._threads_of:
            inside = (item for block in partition for item in self.graph.blocks[block].instructions)
            named = (_barrier_threads(item) for item in inside if item.root in ("bar", "barrier"))
            self._threads_of[partition] = max(named, default=0) or WARP
        return self._threads_of[partition]

    def _waits(self) -> Iterator[Wait]:
        """Loops that are left depending on what an acquire inside them saw."""
        for loop in self.graph.loops:
            polls = tuple(
                access
                for access in self.shared
                if access.is_acquire and self.graph.innermost(self.graph.block_of[access.instruction.index]) == loop
            )
            if not polls:
                continue
            causes = {edge: self.causes(edge, loop, polls) for edge in loop.exits}
            exits = {
                cause: tuple(edge for edge in loop.exits if cause in causes[edge])
                for cause in ("seen", "timed", "aborted", "blind")
            }
            if exits["seen"]:
                pointers = frozenset[str]().union(*(poll.pointers for poll in polls))
                yield Wait(loop=loop, polls=polls, pointers=pointers, done=tuple(self._done(loop, polls)), **exits)

    def causes(self, edge: Edge, loop: Loop, polls: tuple[Access, ...]) -> set[str]:
        """What an exit depends on. Only what is read inside the loop counts: a clock read before it stands still."""
        if edge.branch is None:
            return {"blind"}
        inside = {item.index for block in loop.blocks for item in self.graph.blocks[block].instructions}
        origins = self.flow.of_predicate(edge.branch)
        read = {int(origin[5:]) for origin in origins if origin.startswith("read:")} & inside
        looks = (access.pointers for access in self.flow.accesses if access.instruction.index in read)
        depends = {
            "seen": any(poll.instruction.index in read for poll in polls),
            "timed": any(origin.startswith("timer:") and int(origin[6:]) in inside for origin in origins),
            "aborted": any(look and reaches(look, self.contract.alarm) for look in looks),
        }
        return {cause for cause, is_so in depends.items() if is_so} or {"blind"}

    def _done(self, loop: Loop, polls: tuple[Access, ...]) -> Iterator[Instruction]:
        split = self._split(loop, polls)
        if split is None:
            yield from (poll.instruction for poll in polls)
            return
        polling = {poll.instruction.index for poll in polls}

        def step(item: Instruction, facts: Facts) -> Facts:
            if self.is_block_barrier(item):
                return NOTHING
            return POLLED if item.index in polling else facts

        before = facts_before(self.graph, Spread(step))
        for item in self.function.instructions:
            if self.is_block_barrier(item) and before.get(item.index) and self.graph.dominates(split, item):
                yield item

    def _split(self, loop: Loop, polls: tuple[Access, ...]) -> Instruction | None:
        """Where the threads that poll part from those that do not; None if every thread polls."""
        for poll in polls:
            if THREAD in self.flow.of_predicate(poll.instruction):
                return poll.instruction
        for block in self._way_to(loop) - loop.blocks:
            branch = self.graph.blocks[block].edges[0].branch
            passed_by = loop.header not in self.graph.postdominators.get(block, ())
            if branch is not None and passed_by and THREAD in self.flow.of_predicate(branch):
                return branch
        return None

    def _way_to(self, loop: Loop) -> frozenset[int]:
        """The blocks on every path to a loop, from where its partition begins."""
        above = self.graph.dominators[loop.header]
        return next((above & region for region in self.graph.partitions if loop.header in region), above)


def _barrier_threads(item: Instruction) -> int:
    """The threads that a barrier names (`bar.sync id, n`, `bar.red p, id, n, q`); 0 if it means the whole block."""
    counted = item.operands[2:-1] if "red" in item.parts else item.operands[1:]
    return 0 if not counted else int(counted[0]) if counted[0].isdigit() else -1
