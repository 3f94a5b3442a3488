"""Whether each annotated load and store reaches the rectangle that its directive declares, and nothing beside it.

Before a call, sizes are samples that nothing has in common, and a stride that is a parameter is solved for; in a call
all are numbers, and nothing is left open.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count
from math import prod
from typing import Any

from overweave.compiler.emit.kernel import Kernel
from overweave.compiler.frontend.access import AccessCheck, Open, Side
from overweave.compiler.frontend.directives import AccessDirective, Place
from overweave.compiler.frontend.expressions import affine_in
from overweave.compiler.frontend.follow import STORES, Followed, Reached, follow
from overweave.compiler.frontend.polynomials import (
    Polynomial,
    TooLarge,
    number,
)
from overweave.compiler.frontend.values import (
    NUMBERED,
    Number,
    comes_from,
)
from overweave.ir.schedule import Range

_PRIMES = (100_003, 120_011, 140_009, 160_001, 180_001, 200_003, 220_009, 240_007, 260_003, 280_001)


def check_places(kernel: Kernel, given: Mapping[str, Any] | None = None) -> None:
    """Raises DirectiveError for the first load or store that is not where its directive says.

    given: the arguments of a call that are no tensors, and `NAME.shape[0]`, `NAME.block_shape[0]` of those that are;
    None before a call.
    """
    numbers = _samples(kernel) if given is None else {k: int(v) for k, v in given.items() if isinstance(v, int)}
    _Check(kernel, numbers, given is not None).all(follow(kernel, given or {}))


def _samples(kernel: Kernel) -> dict[str, int]:
    """Numbers for what directives name: blocks are powers of two, extents prime."""
    blocks = sorted({name for axis in kernel.axes for name in axis.block.names})
    said = [axis.extent for axis in kernel.axes]
    said += [dim for access in (*kernel.loads, *kernel.stores) for dim in access.directive.dims]
    axes = {axis.name for axis in kernel.axes}
    extents = sorted({name for each in said for name in each.names} - set(blocks) - axes)
    extents += sorted(name for name in axes & set(kernel.source.parameters) if name not in (*extents, *blocks))
    found = {name: 16 << at for at, name in enumerate(blocks)}
    return found | dict(zip(extents, chain(_PRIMES, count(300_007, 2)), strict=False))


class _Check:
    def __init__(self, kernel: Kernel, numbers: Mapping[str, int], is_call: bool) -> None:
        self.kernel, self.numbers, self.is_call = kernel, numbers, is_call
        walked = {one.directive.axis: kernel.source.module.code_for_node(one.loop.target) for one in kernel.streams}
        self.variables = dict(kernel.blocks) | walked
        self.lines = kernel.source.text.splitlines()

    def all(self, followed: Followed) -> None:
        for line in followed.other_blocks:
            raise self._at(line).error("the blocks are not those of the first region", "Reckon them from one number")
        stored: dict[AccessDirective, list[tuple[Range, ...]]] = {}
        opened: set[str] = set()
        for reached in followed.reached:
            self._check_number(reached)
            if reached.said is None:
                self._check_unsaid(reached)
                continue
            try:
                touched = AccessCheck(self, reached, reached.said).touched()
            except (Open, TooLarge):
                opened.add(reached.said.tensor)
                continue
            if reached.said.is_store:
                stored.setdefault(reached.said, []).append(touched)
        missing = {one.directive for one in self.kernel.stores} - stored.keys()
        for said in sorted(missing, key=lambda one: one.place.line):
            if self.is_call and said.tensor not in opened | {one.tensor for one in stored}:
                raise said.place.error(
                    "no tile comes to it in this call", "Leave its directive out, or store in every tile"
                )
        self._check_whole(stored, opened)

    def _check_unsaid(self, reached: Reached) -> None:
        """What a function of the file loads of a tensor that it has a directive for has one too."""
        for access in self.kernel.loads:
            if access.helper and isinstance(reached.place, Number) and reached.kind not in STORES:
                if access.directive.parameter in reached.place.poly.atoms:
                    found = f"{access.helper} loads {access.directive.parameter} at another place, without a directive"
                    raise self._at(reached.line).error(found, "Annotate every load of a tensor that is annotated")

    def _check_whole(self, stored: Mapping[AccessDirective, list[tuple[Range, ...]]], opened: set[str]) -> None:
        """What several statements store of a tensor is all of the tile's rectangle."""
        by_tensor: dict[str, list[tuple[AccessDirective, tuple[Range, ...]]]] = {}
        for said, ranges in stored.items():
            by_tensor.setdefault(said.tensor, []).extend((said, each) for each in ranges)
        for tensor, found in by_tensor.items():
            whole = prod(side.size for side in self.sides(found[0][0]))
            areas = [prod(hi - lo for lo, hi in each) for _, each in dict.fromkeys(found)]
            if tensor not in opened and max(areas) < whole > sum(areas):
                said, touched = found[0]
                parts = ", ".join(f"[{lo}:{hi}]" for lo, hi in touched)
                sizes = " x ".join(str(side.size) for side in self.sides(said))
                raise said.place.error(f"a tile stores {parts} of its {sizes} elements", "Store the whole tile")

    def _check_number(self, reached: Reached) -> None:
        """Nothing that is loaded or stored depends on which program it is, or on the number that its tile had."""
        values = [reached.place, *reached.given[0], *reached.given[1].values(), reached.guard]
        if any(NUMBERED in comes_from(value) for value in values):
            place = reached.said.place if reached.said else self._at(reached.line)
            blocks = ", ".join(sorted(self.kernel.blocks.values()))
            what = "its place, or what it stores," if reached.kind in STORES else "its place"
            found = f"{what} is made from a program's number, and the schedule numbers tiles anew"
            raise place.error(found, f"Reckon it from the blocks, {blocks}, alone")

    def _at(self, line: int) -> Place:
        return Place(self.kernel.source.path.name, line, self.lines[line - 1].strip())

    def known(self, poly: Polynomial) -> Polynomial:
        """With the numbers in the place of their names."""
        return poly.replaced(lambda atom: number(self.numbers[atom]) if atom in self.numbers else None)  # type: ignore[index]

    def sides(self, said: AccessDirective) -> list[Side]:
        """The dimensions of a tensor in numbers."""
        axes = {axis.name: axis for axis in self.kernel.axes}
        found: list[Side] = []
        stride = 1
        for dim in reversed(said.dims):
            name, scale, shift = affine_in(dim, axes)
            extent = self._number(axes[name].extent if name else dim)
            side = Side(extent, stride, extent)
            if name:
                block = self._number(axes[name].block)
                step = 1 if axes[name].is_streamed else scale * block
                side = Side(extent, stride, block, name, step, shift * block)
            found.insert(0, side)
            stride *= max(extent, 1)
        return found

    def _number(self, said: Polynomial) -> int:
        known = self.known(said).constant
        if known is None:
            raise Open
        return known
