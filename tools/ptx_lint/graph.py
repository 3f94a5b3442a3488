"""Questions about a control-flow graph: who dominates whom, where the loops are, what a set of facts grows to."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
from msgspec import Struct
from msgspec.structs import replace

from tools.ptx_lint.ptx import Block, Edge, Function, Instruction

Facts = frozenset[str]
NOTHING: Facts = frozenset()


class Loop(Struct, frozen=True):
    """A natural loop. back_edges: those that return to its header; exits: those that leave it."""

    header: int
    blocks: frozenset[int]
    back_edges: tuple[Edge, ...]
    exits: tuple[Edge, ...]


class Graph:
    """The control-flow graph of a function, with what is computed from it once.

    dominators[b]: the blocks on every path from the start to b, b included; postdominators[b]: on every path from b to
    the end. order: the blocks that can be reached, each before what follows it; the others have no dominators.
    loops: outermost first. partitions: of a warp-specialised kernel, the blocks that each group of warps runs. Such a
    group ends where it returns to the dispatcher that sent it off: it never becomes another group.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.end = len(function.blocks) - 1
        entries, self.blocks = _separated(function)
        self.edges = tuple(edge for block in self.blocks for edge in block.edges)
        self.block_of = {item.index: block.index for block in self.blocks for item in block.instructions}
        self.flow = _flow(self.blocks)
        self.dominators = _dominators(self.flow, 0)
        self.order = [*self.dominators]
        self.postdominators = _dominators(self.flow.reverse(copy=False), self.end)
        self.loops = self._loops()
        regions = (frozenset(block for block, above in self.dominators.items() if entry in above) for entry in entries)
        self.partitions = tuple(region for region in regions if region)

    def dominates(self, first: Instruction, second: Instruction) -> bool:
        """Whether every path to `second` runs through `first`."""
        a, b = self.block_of[first.index], self.block_of[second.index]
        return first.index <= second.index if a == b else a in self.dominators.get(b, ())

    def partition_of(self, item: Instruction) -> frozenset[int] | None:
        """The partition that runs an instruction; None if all warps do."""
        return next((region for region in self.partitions if self.block_of[item.index] in region), None)

    def innermost(self, block: int) -> Loop | None:
        """The smallest loop around a block."""
        return next((loop for loop in reversed(self.loops) if block in loop.blocks), None)

    def branches_around(self, block: int) -> tuple[Edge, ...]:
        """The edges by which decisions on the way to `block` pass it by."""
        above = self.dominators.get(block, frozenset())
        decisions = (other for other in above if block not in self.postdominators.get(other, ()))
        return tuple(edge for other in decisions for edge in self.blocks[other].edges if edge.target not in above)

    def _loops(self) -> tuple[Loop, ...]:
        back: dict[int, list[Edge]] = {}
        for edge in self.edges:
            if edge.target in self.dominators.get(edge.source, ()):
                back.setdefault(edge.target, []).append(edge)
        loops = []
        for header, edges in back.items():
            inside = {header}
            waiting = [edge.source for edge in edges]
            while waiting:
                block = waiting.pop()
                if block not in inside:
                    inside.add(block)
                    waiting.extend(self.flow.predecessors(block))
            exits = tuple(edge for edge in self.edges if edge.source in inside and edge.target not in inside)
            loops.append(Loop(header, frozenset(inside), tuple(edges), exits))
        return tuple(sorted(loops, key=lambda loop: -len(loop.blocks)))


class Spread(Struct, frozen=True):
    """How facts move: `step` through an instruction, `cross` over an edge; `start` holds where the walk begins."""

    step: Callable[[Instruction, Facts], Facts]
    start: Facts = NOTHING
    cross: Callable[[Edge, Facts], Facts] = lambda _edge, facts: facts


def facts_before(graph: Graph, spread: Spread) -> dict[int, Facts]:
    """The facts that hold on some path from the start to each instruction, before it runs."""
    return _spread(graph, spread, forward=True)


def facts_after(graph: Graph, spread: Spread) -> dict[int, Facts]:
    """The facts that hold on some path from the end back to each instruction, after it ran."""
    return _spread(graph, spread, forward=False)


def _separated(function: Function) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """The first blocks of partitions, and all blocks with the ways back to a dispatcher turned to the end.

    A dispatcher is an indirect branch that no other one comes before; partitions are what it may reach, and what passes
    it by on the way there.
    """
    flow = _flow(function.blocks)
    dispatchers = [block.index for block in function.blocks if any(_is_indirect(edge) for edge in block.edges)]
    if not dispatchers:
        return (), function.blocks
    dominators = _dominators(flow, 0)
    dispatchers = [one for one in dispatchers if not any(other in dominators[one] - {one} for other in dispatchers)]
    above = frozenset[int]().union(*(dominators[block] for block in dispatchers))
    entries = tuple(sorted({target for block in above for target in flow.successors(block)} - above))
    end = len(function.blocks) - 1
    blocks = []
    for block in function.blocks:
        edges = block.edges
        if not dominators.get(block.index, frozenset()).isdisjoint(entries):
            edges = tuple(replace(edge, target=end) if edge.target in above else edge for edge in edges)
        blocks.append(replace(block, edges=edges))
    return entries, tuple(blocks)


def _flow(blocks: tuple[Block, ...]) -> nx.DiGraph:
    """Which block may follow which."""
    flow = nx.DiGraph()
    flow.add_nodes_from(block.index for block in blocks)
    flow.add_edges_from((edge.source, edge.target) for block in blocks for edge in block.edges)
    return flow


def _is_indirect(edge: Edge) -> bool:
    return edge.branch is not None and edge.branch.root == "brx"


def _spread(graph: Graph, spread: Spread, *, forward: bool) -> dict[int, Facts]:
    entering: dict[int, Facts] = {block.index: NOTHING for block in graph.blocks}
    first = 0 if forward else graph.end
    entering[first] = spread.start
    found: dict[int, Facts] = {}
    waiting = [block.index for block in graph.blocks]
    incoming: dict[int, list[Edge]] = {block.index: [] for block in graph.blocks}
    for edge in graph.edges:
        incoming[edge.target].append(edge)
    while waiting:
        block = waiting.pop()
        facts = entering[block]
        instructions = graph.blocks[block].instructions
        for item in instructions if forward else reversed(instructions):
            found[item.index] = facts
            facts = spread.step(item, facts)
        for edge in graph.blocks[block].edges if forward else incoming[block]:
            after = edge.target if forward else edge.source
            grown = entering[after] | spread.cross(edge, facts)
            if grown != entering[after]:
                entering[after] = grown
                waiting.append(after)
    return found


def _dominators(flow: nx.DiGraph, root: int) -> dict[int, frozenset[int]]:
    """Each node that can be reached before what follows it, loops aside, and with the nodes on every path to it."""
    nearest = nx.immediate_dominators(flow, root)
    above: dict[int, frozenset[int]] = {root: frozenset((root,))}
    for node in reversed([*nx.dfs_postorder_nodes(flow, root)][:-1]):
        above[node] = above[nearest[node]] | {node}
    return above
