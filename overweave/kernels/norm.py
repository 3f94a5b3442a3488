"""The ordered sum of whole rows, normed on their way to the caller: how an all-reduce ends, in its last pass."""

import triton
import triton.language as tl

from overweave.lang.tile_table import ROW, ROW_END, SOURCE_ROW, read_column


@triton.jit
def ordered_sum(addresses, out, offsets, inside, verdict, OPERANDS: tl.constexpr, SUM_FIRST: tl.constexpr = False):
    """The operands at `addresses`, each at the same offsets, added in their order in fp32; NaN where a wait failed.

    They are of out's dtype. SUM_FIRST: but for the first one, a sum that is kept in fp32.
    """
    total = tl.zeros(inside.shape, dtype=tl.float32)
    for index in tl.static_range(OPERANDS):  # unrolled: the loads of all operands are in flight together
        address = tl.load(addresses + index)
        kept_as = tl.pointer_type(tl.float32) if SUM_FIRST and index == 0 else out.dtype
        operand = tl.multiple_of(address.to(kept_as), 16)
        total += tl.load(operand + offsets, mask=inside & (address != 0), other=0.0).to(tl.float32)
    return total + tl.where(verdict == 1, 0.0, float("nan"))


@triton.jit
def sum_and_norm_rows(
    addresses, out, residual, norm_weight, z, table, tile, n, verdict,
    OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows, BLOCK_N columns at a time. What goes to the caller's `out` is normed:
    `z = sum + residual`, stored, and `z / rms(z) * norm_weight`; sums that go elsewhere are stored as they are.

    Rounded where torch rounds: the sum before the residual is added, and z, of which the norm is. So z has the same
    bits in every plan, whether its sum has travelled or not. residual None: nothing is added. addresses: of the
    operands, then of where the sum goes (0: to the caller).
    """
    row, own = read_column(table, tile, ROW), tl.arange(0, BLOCK_M)
    has_row = own < read_column(table, tile, ROW_END) - row
    source_starts = (read_column(table, tile, SOURCE_ROW) + own).to(tl.int64)[:, None] * n
    starts = (row + own).to(tl.int64)[:, None] * n
    target_address = tl.load(addresses + OPERANDS)
    target = tl.multiple_of(target_address.to(out.dtype), 16)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for col in range(0, n, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        inside = has_row[:, None] & (cols < n)[None, :]
        total = ordered_sum(addresses, out, source_starts + cols[None, :], inside, verdict, OPERANDS)
        rounded = total.to(out.dtype.element_ty)
        if target_address != 0:
            tl.store(target + source_starts + cols[None, :], rounded, mask=inside)
        else:
            if residual is not None:
                beside = tl.load(residual + starts + cols[None, :], mask=inside, other=0.0).to(tl.float32)
                rounded = (rounded.to(tl.float32) + beside).to(out.dtype.element_ty)
            tl.store(z + starts + cols[None, :], rounded, mask=inside)
            value = rounded.to(tl.float32)
            squares += tl.sum(value * value, axis=1)
    if target_address == 0:
        tl.debug_barrier()  # what is read of z below may have been written by another thread
        scale = tl.rsqrt(squares / n + EPS)[:, None]
        for col in range(0, n, BLOCK_N):
            cols = col + tl.arange(0, BLOCK_N)
            inside = has_row[:, None] & (cols < n)[None, :]
            value = tl.load(z + starts + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(norm_weight + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
            tl.store(out + starts + cols[None, :], (value * scale * weight).to(out.dtype.element_ty), mask=inside)
