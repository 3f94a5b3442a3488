"""Where annotated loads and stores lie: where the blocks of their tile say, and nowhere else.

The schedule numbers tiles as it likes, so a second reckoning beside the dispatch region would be of another tile; and
what a directive says of a dimension must be what its address is made from.
"""

from __future__ import annotations

import libcst as cst

from overweave.compiler.emit.kernel import Access, Kernel
from overweave.compiler.frontend.callees import Callees
from overweave.compiler.frontend.directives import AccessDirective
from overweave.compiler.frontend.language import is_value
from overweave.compiler.frontend.names import PROGRAM, Assignment, Origins, accesses_in, assignments, used_names


def check_places(kernel: Kernel, callees: Callees) -> None:
    """Raises DirectiveError for a place that the tile's number tells in another way, or that a block does not tell."""
    source, blocks = kernel.source, kernel.blocks
    numbers = {kernel.number} - {*blocks.values()} if kernel.number and kernel.dispatch else set()
    found = [pair for pair in _assignments(kernel) if pair[0] not in numbers]
    origins = Origins(found, {*source.parameters, *numbers}, source.language, callees.asks_number)
    again = sorted(one for one in blocks.values() if origins.of(cst.Name(one)) & {PROGRAM, *numbers})
    if again:
        why = f"{again[0]} is made again from the tile's number, behind the dispatch region"
        raise source.place().error(why, "Reckon blocks in that region alone: the schedule says which tile comes when")
    walked = {stream.directive.axis: "".join(used_names(stream.loop.target)) for stream in kernel.streams}
    variables = {**blocks, **walked}
    told = Origins(found, variables.values(), source.language)
    for access in (*kernel.loads, *kernel.stores):
        nodes = _addresses(kernel, access)
        _check_number(access.directive, origins.of(*nodes) & {PROGRAM, *numbers}, sorted(blocks.values()))
        _check_dims(access.directive, told.of(*nodes), variables)


def _check_number(said: AccessDirective, by: frozenset[str], blocks: list[str]) -> None:
    if by:
        how = "a program's number" if PROGRAM in by else min(by)
        cure = f"Reckon it from the blocks, {', '.join(blocks)}, alone"
        raise said.place.error(f"its place is made from {how}, beside the dispatch region", cure)


def _check_dims(said: AccessDirective, made: frozenset[str], variables: dict[str, str]) -> None:
    for dim in said.dims:
        for axis in sorted(dim.names & variables.keys()):
            if variables[axis] not in made:
                found = f"its place is not made from {variables[axis]}, which is the block along {axis}"
                listed = ", ".join(sorted(one for one, variable in variables.items() if variable in made)) or "none"
                cure = f"Name the axes that it is made from ({listed}), or an extent where every tile reaches all"
                raise said.place.error(found, cure)


def _assignments(kernel: Kernel) -> list[Assignment]:
    """All of the kernel's, but those that the compiler replaces, and what blocks hold before these."""
    lo, hi = kernel.dispatch or (0, 0)
    above = kernel.source.function.body.body[: kernel.loop] if kernel.loop is not None else ()
    begins = kernel.body[kernel.first] if kernel.loop is None else None
    blocks = set(kernel.blocks.values())
    before = [one for one in (*kernel.body[:lo], *above) if one is not begins]
    behind = [one for one in kernel.body[hi:] if one is not begins]
    found = [pair for one in before for pair in assignments(one) if pair[0] not in blocks]
    return found + [pair for one in behind for pair in assignments(one)]


def _addresses(kernel: Kernel, access: Access) -> list[cst.CSTNode]:
    """What tells where an annotated call reaches: all but what is stored."""
    is_store = access.directive.is_store
    nodes: list[cst.CSTNode] = []
    for call in accesses_in(access.statement, "store" if is_store else "load", kernel.source.language):
        nodes.append(call.func.value if isinstance(call.func, cst.Attribute) else call.func)
        nodes += [arg.value for at, arg in enumerate(call.args) if not (is_store and is_value(at, arg))]
    return nodes
