"""Where the rectangles of a tile lie in shared memory, and some of them as one.

A stage of operands, or a consumer's result, is a group of rectangles. As many of each group as the largest power of two
come first, group by group, and the rest of all groups behind them: of 3 rectangles in each of G groups, rectangle 0 of
group g is number 2 g, and rectangle 2 number 2 G + g. So whatever is multiplied in one accumulator lies at a multiple
of its own size, which is how Triton 3.9 lets shared memory be seen in another shape. Where a Triton takes only shapes
of the same size, and as many rectangles as there are do not make whole ones of that power of two, the rest is an
allocation of its own.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.compat.triton_names import VIEWS_ARE_WHOLE, reinterpret

VIEWED_WHOLE = gl.constexpr(VIEWS_ARE_WHOLE)


class Rectangles(NamedTuple):
    """Of all groups, in shared memory `[count, rows, columns]`. rest: those behind `first`, None if all lie there."""

    first: Any
    rest: Any


@gluon.constexpr_function
def power_of_two(count):
    """The largest up to `count`."""
    return 1 << (count.bit_length() - 1)


@gluon.constexpr_function
def count_first(parts, groups):
    """How many rectangles the first allocation has, of `parts` in each of so many groups: all, if it may have them."""
    whole = power_of_two(parts)
    return whole * groups if VIEWED_WHOLE.value and parts * groups % whole else parts * groups


@gluon.jit
def place(rectangles, group, part: gl.constexpr, GROUPS: gl.constexpr):
    """Where a group's rectangle `part` lies, of GROUPS groups: in which allocation, and its number there."""
    PARTS: gl.constexpr = rectangles.first.type.shape[0] // GROUPS
    WHOLE: gl.constexpr = power_of_two(PARTS)
    if part < WHOLE:
        return rectangles.first, WHOLE * group + part
    elif rectangles.rest is None:
        return rectangles.first, WHOLE * GROUPS + (PARTS - WHOLE) * group + (part - WHOLE)
    else:
        return rectangles.rest, rectangles.rest.type.shape[0] // GROUPS * group + (part - WHOLE)


@gluon.jit
def rectangle(rectangles, group, part: gl.constexpr, GROUPS: gl.constexpr):
    """A group's rectangle `part`, of GROUPS groups."""
    tiles, number = place(rectangles, group, part, GROUPS)
    return tiles.index(number)


@gluon.jit
def side_by_side(
    rectangles, group, part: gl.constexpr, MANY: gl.constexpr, GROUPS: gl.constexpr, DOWN: gl.constexpr
):  # fmt: skip
    """MANY rectangles of a group, from `part` on, as one: beside each other, or with DOWN one below the other."""
    if MANY == 1:
        return rectangle(rectangles, group, part, GROUPS)
    else:
        tiles = rectangles.first
        WHOLE: gl.constexpr = power_of_two(tiles.type.shape[0] // GROUPS)
        gl.static_assert(part % MANY == 0 and part + MANY <= WHOLE)
        ROWS: gl.constexpr = tiles.type.shape[1] * (MANY if DOWN else 1)
        COLS: gl.constexpr = tiles.type.shape[2] * (1 if DOWN else MANY)
        wide = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] // MANY, ROWS, COLS], tiles.type.layout)
        return wide.index(WHOLE // MANY * group + part // MANY)
