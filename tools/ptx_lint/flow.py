"""Where values come from: which argument a pointer points into, and what a branch depends on.

A forward walk carries, for each register, the set of its *origins*, joined over all paths:

    name        derived by arithmetic from the pointer argument `name` (or from the address of a descriptor argument)
    *name       read from memory that `name` points to: a pointer out of a table has this origin and no other
    read:I      read from global memory by instruction I (so a branch that depends on a poll is recognised)
    timer:I     read from the global timer by instruction I
    %thread     differs from thread to thread of a block

Not tracked: which element of a table. What is loaded from shared memory may point wherever anything stored there
points, and depends on what was stored there last (so Triton broadcasts a scalar atomic). A descriptor built on the
device has the origins of every pointer that was ever written into a descriptor. Local memory and calls lose origins.
A pointer without any origin is taken to reach everything, and is reported where it signals (`undeclared-signal`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Literal

from msgspec import Struct

from tools.ptx_lint.graph import NOTHING, Facts, Graph
from tools.ptx_lint.ptx import Instruction, registers

THREAD = "%thread"
SHARED, BROADCAST = "[shared]", "[broadcast]"
_PER_THREAD = ("%tid", "%laneid", "%warpid", "%lanemask")
_ELSEWHERE = ("shared", "shared::cta", "shared::cluster", "param", "param::entry", "const", "local")
_ORDERS = ("acquire", "release", "acq_rel", "relaxed", "volatile", "mmio")
_SCOPES = ("cta", "cluster", "gpu", "sys")

Origins = int  # a set of origins, a bit for each: it is copied and joined some hundred thousand times
State = dict[str, Origins]
Kind = Literal["load", "store", "atomic", "bulk_load", "bulk_store"]


class Access(Struct, frozen=True):
    """One access to global memory.

    pointers: the arguments it may reach (`name` or `*name`). order: acquire, release, acq_rel, relaxed, volatile, mmio
    or weak. scope: cta, cluster, gpu, sys, or empty for weak accesses.
    """

    instruction: Instruction
    kind: Kind
    pointers: Facts
    order: str
    scope: str

    @property
    def is_acquire(self) -> bool:
        return self.order == "acquire" or (self.order == "acq_rel" and self.kind == "atomic")

    @property
    def is_release(self) -> bool:
        return self.order in ("release", "acq_rel") and self.kind in ("store", "atomic")

    @property
    def adds_data(self) -> bool:
        """Whether it adds floating-point numbers: data, as signals are integers."""
        return self.kind == "atomic" and self.instruction.parts[-1].lstrip("b").startswith("f")


class _Bits:
    """Which bit stands for which origin: pointer `name` the even one of a pair, `*name` the odd one, others as met."""

    def __init__(self, pointers: Iterable[str]) -> None:
        self._names: list[str] = [origin for name in dict.fromkeys(pointers) for origin in (name, f"*{name}")]
        self._facts: dict[Origins, Facts] = {0: NOTHING}
        self.arguments = (1 << len(self._names)) - 1
        self._direct = self.arguments // 3  # every other bit, the lowest among them
        self._bit = {name: 1 << at for at, name in enumerate(self._names)}
        self.thread = self[THREAD]
        self.reads = 0

    def __getitem__(self, name: str) -> Origins:
        if name not in self._bit:
            self._bit[name] = 1 << len(self._names)
            self._names.append(name)
        return self._bit[name]

    def read(self, item: Instruction) -> Origins:
        bit = self[f"read:{item.index}"]
        self.reads |= bit
        return bit

    def through(self, pointers: Origins) -> Origins:
        """What is read from memory that `pointers` point to; what came out of a table stays that."""
        found = pointers & self.arguments
        return (found & self._direct) << 1 | found & ~self._direct

    def facts(self, origins: Origins) -> Facts:
        if origins not in self._facts:
            self._facts[origins] = frozenset(name for at, name in enumerate(self._names) if origins >> at & 1)
        return self._facts[origins]


class Flow:
    """The origins of every operand of a function. `arguments`: PTX parameter position -> pointer argument name."""

    def __init__(self, graph: Graph, arguments: Mapping[int, str]) -> None:
        self._bits = _Bits(arguments.values())
        self._operands: dict[int, tuple[Origins, ...]] = {}
        self._predicates: dict[int, Origins] = {}
        self._maps = self._shared = self._elsewhere = 0
        parameters = graph.function.parameters
        start: State = {parameters[at]: self._bits[name] for at, name in arguments.items()}
        needed = _needed_on_entry(graph)
        self._fill(graph, start, needed)
        if graph.partitions:  # what one group of warps stored, another may load
            self._elsewhere = self._shared
            self._fill(graph, start, needed)
        accesses = (self._access(item) for item in graph.function.instructions)
        self.accesses: tuple[Access, ...] = tuple(access for access in accesses if access is not None)

    def of_operand(self, instruction: Instruction, position: int) -> Facts:
        """What the operand may derive from; nothing in code that cannot be reached."""
        operands = self._operands.get(instruction.index)
        return self._bits.facts(operands[position]) if operands else NOTHING

    def of_predicate(self, instruction: Instruction) -> Facts:
        """What decides whether the instruction runs; nothing if it always does."""
        return self._bits.facts(self._predicates.get(instruction.index, 0))

    def _fill(self, graph: Graph, start: State, needed: Mapping[int, frozenset[str]]) -> None:
        entering: dict[int, State] = {0: start}
        rank = {block: at for at, block in enumerate(graph.order)}
        waiting = [0]  # ranks
        while waiting:
            block = graph.order[heappop(waiting)]
            state = dict(entering[block])
            for item in graph.blocks[block].instructions:
                self._operands[item.index] = tuple(self._origins(operand, state) for operand in item.operands)
                if item.predicate is not None:
                    self._predicates[item.index] = state.get(item.predicate.register, 0)
                self._step(item, state)
            for edge in graph.blocks[block].edges:
                is_new = edge.target not in entering
                has_grown = _join(entering.setdefault(edge.target, {}), state, needed[edge.target])
                if (has_grown or is_new) and rank[edge.target] not in waiting:
                    heappush(waiting, rank[edge.target])

    def _origins(self, operand: str, state: State) -> Origins:
        found = self._bits.thread if operand.startswith(_PER_THREAD) else 0
        for name in registers(operand):
            found |= state.get(name, 0)
        return found

    def _step(self, item: Instruction, state: State) -> None:
        if item.root in ("st", "stmatrix") and is_shared(item):
            stored = self._operands[item.index][1] & ~self._bits.thread
            state[BROADCAST] = stored
            state[SHARED] = state.get(SHARED, 0) | stored & self._bits.arguments
            self._shared |= state[SHARED]
        elif item.root == "tensormap" and "global_address" in item.parts:
            self._maps |= self._operands[item.index][1]
        result = self._result(item, state)
        for name in item.writes:
            old = state.get(name, 0) if item.predicate is not None else 0
            state[name] = result | old

    def _result(self, item: Instruction, state: State) -> Origins:
        operands, bits = self._operands[item.index], self._bits
        if item.root in ("ld", "ldu", "atom", "ldmatrix"):
            if is_shared(item):
                stored = self._elsewhere | state.get(SHARED, 0) | state.get(BROADCAST, 0)
                return stored | operands[1] & bits.thread
            if any(part in _ELSEWHERE for part in item.parts):
                return operands[1]  # ld.param: the argument itself
            return bits.through(operands[1]) | bits.read(item) | operands[1] & bits.thread
        if item.root == "elect":
            return bits.thread
        union = 0
        for operand in operands[1:]:
            union |= operand
        if "f32" in item.parts:  # no branch and no address depends on a sum, and a sum depends on everything
            union &= ~bits.reads
        if any("%globaltimer" in operand for operand in item.operands[1:]):
            return union | bits[f"timer:{item.index}"]
        return union

    def _access(self, item: Instruction) -> Access | None:
        place = _place(item)
        if place is None or item.index not in self._operands:
            return None
        kind, position = place
        pointers = self._operands[item.index][position] & self._bits.arguments
        pointers = pointers or (self._maps if kind.startswith("bulk") else 0)
        order = next((part for part in item.parts if part in _ORDERS), "relaxed" if kind == "atomic" else "weak")
        scope = next((part for part in item.parts if part in _SCOPES), "gpu" if kind == "atomic" else "")
        return Access(item, kind, self._bits.facts(pointers), order, scope)


def is_shared(item: Instruction) -> bool:
    """Whether an instruction addresses shared memory."""
    return any(part.startswith("shared") for part in item.parts) or item.root in ("ldmatrix", "stmatrix")


def direct(pointers: Facts) -> Facts:
    """The arguments an address is derived from by arithmetic alone, tables left out."""
    return frozenset(name for name in pointers if not name.startswith("*"))


def reaches(pointers: Facts, names: tuple[str, ...]) -> bool:
    """Whether an access may touch what one of `names` points to. A pointer of unknown origin may touch anything.

    An offset read from memory adds an origin `*order` beside the base `y`: then only the base counts.
    """
    return not pointers or not (direct(pointers) or pointers).isdisjoint(names)


def _place(item: Instruction) -> tuple[Kind, int] | None:
    """What kind of access to global memory an instruction is, and which operand holds the address."""
    if item.root == "cp":
        return _bulk_place(item)
    if item.root not in ("ld", "ldu", "st", "atom", "red") or any(part in _ELSEWHERE for part in item.parts):
        return None
    if item.root == "st":
        return "store", 0
    if item.root in ("atom", "red"):
        return "atomic", 0 if item.root == "red" else 1
    return "load", 1


def _bulk_place(item: Instruction) -> tuple[Kind, int] | None:
    """`cp.async` in its forms: the first state space named is the destination."""
    spaces = [part.split("::")[0] for part in item.parts if part.split("::")[0] in ("shared", "global")]
    if len(spaces) < 2 or spaces[0] == spaces[1]:
        return None
    if "bulk" not in item.parts:
        return "load", 1
    return ("bulk_store", 0) if spaces[0] == "global" else ("bulk_load", 1)


def _needed_on_entry(graph: Graph) -> dict[int, frozenset[str]]:
    """For each block, the registers that it, or what follows it, reads before they are written: what travels to it."""
    read: dict[int, set[str]] = {}
    written: dict[int, set[str]] = {}
    for block in graph.order:
        read[block], written[block] = {SHARED, BROADCAST}, set()
        for item in graph.blocks[block].instructions:
            names = {name for operand in item.operands for name in registers(operand)}
            if item.predicate is not None:  # it may leave the old value
                names |= {item.predicate.register, *item.writes}
            read[block] |= names - written[block]
            written[block] |= set(item.writes)
    needed = {block: frozenset(names) for block, names in read.items()}
    is_growing = True
    while is_growing:
        is_growing = False
        for block in reversed(graph.order):
            behind = frozenset().union(*(needed[edge.target] for edge in graph.blocks[block].edges))
            more = needed[block] | (behind - written[block])
            is_growing |= len(more) > len(needed[block])
            needed[block] = more
    return needed


def _join(into: State, state: State, names: Iterable[str]) -> bool:
    has_grown = False
    for name in names:
        if origins := state.get(name):
            old = into.get(name, 0)
            if origins & ~old:
                into[name] = origins | old
                has_grown = True
    return has_grown
