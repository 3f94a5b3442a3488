"""Where the rectangles of a tile lie in shared memory, and some of them as one.

A stage of operands, or a consumer's result, is a group of rectangles. As many of each group as the largest power of two
come first, group by group, and the rest of all groups behind them: of 3 rectangles in each of G groups, rectangle 0 of
group g is number 2 g, and rectangle 2 number 2 G + g. So whatever is multiplied in one accumulator lies at a multiple
of its own size, which is how Triton 3.9 lets shared memory be seen in another shape.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.compat.triton_names import reinterpret


@gluon.constexpr_function
def power_of_two(count):
    """The largest up to `count`."""
    return 1 << (count.bit_length() - 1)


@gluon.jit
def rectangle(group, part: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr):
    """The number of a group's rectangle `part`, of PARTS in each of GROUPS groups."""
    WHOLE: gl.constexpr = power_of_two(PARTS)
    if part < WHOLE:
        return WHOLE * group + part
    else:
        return WHOLE * GROUPS + (PARTS - WHOLE) * group + (part - WHOLE)


@gluon.jit
def side_by_side(
    tiles, group, part: gl.constexpr, MANY: gl.constexpr, GROUPS: gl.constexpr, DOWN: gl.constexpr
):  # fmt: skip
    """MANY rectangles of a group, from `part` on, as one: beside each other, or with DOWN one below the other."""
    PARTS: gl.constexpr = tiles.type.shape[0] // GROUPS
    WHOLE: gl.constexpr = power_of_two(PARTS)
    if MANY == 1:
        return tiles.index(rectangle(group, part, PARTS, GROUPS))
    else:
        gl.static_assert(part % MANY == 0 and part + MANY <= WHOLE)
        ROWS: gl.constexpr = tiles.type.shape[1] * (MANY if DOWN else 1)
        COLS: gl.constexpr = tiles.type.shape[2] * (1 if DOWN else MANY)
        wide = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] // MANY, ROWS, COLS], tiles.type.layout)
        return wide.index(WHOLE // MANY * group + part // MANY)
