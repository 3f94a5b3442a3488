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

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Literal

from msgspec import Struct

from overweave.compiler.ptx import Instruction, registers
from overweave.compiler.ptx_graph import NOTHING, Facts, Graph

THREAD = "%thread"
SHARED, BROADCAST = "[shared]", "[broadcast]"
_PER_THREAD = ("%tid", "%laneid", "%warpid", "%lanemask")
_ELSEWHERE = ("shared", "shared::cta", "shared::cluster", "param", "param::entry", "const", "local")
_ORDERS = ("acquire", "release", "acq_rel", "relaxed", "volatile", "mmio")
_SCOPES = ("cta", "cluster", "gpu", "sys")

State = dict[str, Facts]
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


class Flow:
    """The origins of every operand of a function. `arguments`: PTX parameter position -> pointer argument name."""

    def __init__(self, graph: Graph, arguments: Mapping[int, str]) -> None:
        self._operands: dict[int, tuple[Facts, ...]] = {}
        self._predicates: dict[int, Facts] = {}
        self._maps = self._shared = self._elsewhere = NOTHING
        parameters = graph.function.parameters
        start: State = {parameters[at]: frozenset((name,)) for at, name in arguments.items()}
        self._fill(graph, start)
        if graph.partitions:  # what one group of warps stored, another may load
            self._elsewhere = self._shared
            self._fill(graph, start)
        accesses = (self._access(item) for item in graph.function.instructions)
        self.accesses: tuple[Access, ...] = tuple(access for access in accesses if access is not None)

    def of_operand(self, instruction: Instruction, position: int) -> Facts:
        """What the operand may derive from; nothing in code that cannot be reached."""
        operands = self._operands.get(instruction.index)
        return operands[position] if operands else NOTHING

    def of_predicate(self, instruction: Instruction) -> Facts:
        """What decides whether the instruction runs; nothing if it always does."""
        return self._predicates.get(instruction.index, NOTHING)

    def _fill(self, graph: Graph, start: State) -> None:
        entering: dict[int, State] = {0: start}
        rank = {block: at for at, block in enumerate(graph.order)}
        needed = _needed_on_entry(graph)
        waiting = [0]  # ranks
        while waiting:
            block = graph.order[heappop(waiting)]
            state = dict(entering[block])
            for item in graph.blocks[block].instructions:
                self._operands[item.index] = tuple(_origins(operand, state) for operand in item.operands)
                if item.predicate is not None:
                    self._predicates[item.index] = state.get(item.predicate.register, NOTHING)
                self._step(item, state)
            for edge in graph.blocks[block].edges:
                is_new = edge.target not in entering
                arriving = {name: state[name] for name in needed[edge.target] if name in state}
                if (_join(entering.setdefault(edge.target, {}), arriving) or is_new) and rank[
                    edge.target
                ] not in waiting:
                    heappush(waiting, rank[edge.target])

    def _step(self, item: Instruction, state: State) -> None:
        if item.root in ("st", "stmatrix") and is_shared(item):
            stored = self._operands[item.index][1] - {THREAD}
            state[BROADCAST] = stored
            state[SHARED] = state.get(SHARED, NOTHING) | frozenset(filter(_is_argument, stored))
            self._shared |= state[SHARED]
        elif item.root == "tensormap" and "global_address" in item.parts:
            self._maps |= self._operands[item.index][1]
        result = self._result(item, state)
        for name in item.writes:
            old = state.get(name, NOTHING) if item.predicate is not None else NOTHING
            state[name] = result | old

    def _result(self, item: Instruction, state: State) -> Facts:
        operands = self._operands[item.index]
        if item.root in ("ld", "ldu", "atom", "ldmatrix"):
            if is_shared(item):
                stored = self._elsewhere | state.get(SHARED, NOTHING) | state.get(BROADCAST, NOTHING)
                return stored | (operands[1] & {THREAD})
            if any(part in _ELSEWHERE for part in item.parts):
                return operands[1]  # ld.param: the argument itself
            through = {name if name.startswith("*") else f"*{name}" for name in operands[1] if _is_argument(name)}
            return frozenset(through | {f"read:{item.index}"}) | (operands[1] & {THREAD})
        if item.root == "elect":
            return frozenset((THREAD,))
        union = frozenset[str]().union(*operands[1:])
        if "f32" in item.parts:  # no branch and no address depends on a sum, and a sum depends on everything
            union = frozenset(name for name in union if not name.startswith("read:"))
        if any("%globaltimer" in operand for operand in item.operands[1:]):
            return union | {f"timer:{item.index}"}
        return union

    def _access(self, item: Instruction) -> Access | None:
        place = _place(item)
        if place is None or item.index not in self._operands:
            return None
        kind, position = place
        pointers = frozenset(name for name in self._operands[item.index][position] if _is_argument(name))
        pointers = pointers or (self._maps if kind.startswith("bulk") else NOTHING)
        order = next((part for part in item.parts if part in _ORDERS), "relaxed" if kind == "atomic" else "weak")
        scope = next((part for part in item.parts if part in _SCOPES), "gpu" if kind == "atomic" else "")
        return Access(item, kind, pointers, order, scope)


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


def _is_argument(name: str) -> bool:
    return ":" not in name and name != THREAD


def _origins(operand: str, state: State) -> Facts:
    found = NOTHING
    for name in registers(operand):
        found |= state.get(name, NOTHING)
    return found | {THREAD} if operand.startswith(_PER_THREAD) else found


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


def _join(into: State, state: State) -> bool:
    grown = False
    for name, origins in state.items():
        old = into.get(name)
        if old is origins or (old is not None and origins <= old):
            continue
        into[name] = origins | (old or NOTHING)
        grown = True
    return grown
