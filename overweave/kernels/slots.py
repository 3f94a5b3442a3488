"""Combine of a mixture of experts: sums each token's top-k expert outputs, then the partial sums of other ranks."""

import triton
import triton.language as tl


@triton.jit
def add_slots_kernel(
    z,
    positions,
    routed,
    weights,
    received,
    out,
    shape,
    TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Compute out[row] = sum over k of weights[row, k] * z[positions[row, k]], in fp32, in order of k.

    z `[pairs, cols]`: outputs of experts. positions int32 `[rows, TOP]`: row of z; one >= `routed` (an int32 in memory)
    has no expert and adds nothing. weights fp32 `[rows, TOP]`, or None for 1. received: None, or `[RANKS, rows, cols]`:
    partial sums of other ranks, added in rank order, in fp32; the own rank's is computed here, rounded as if it were
    sent. shape: SlotsShape. Each task is BLOCK_N columns of a row.
    """
    count = tl.load(routed)
    col_blocks = tl.cdiv(shape.cols, BLOCK_N)
    for task in range(tl.program_id(0), shape.rows * col_blocks, tl.num_programs(0)):
        row = (task // col_blocks).to(tl.int64)
        cols = task % col_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        in_row = cols < shape.cols
        own_sum = tl.zeros([BLOCK_N], tl.float32)
        for choice in tl.static_range(TOP):
            row_in_z = tl.load(positions + row * TOP + choice)
            is_routed = row_in_z < count
            product = tl.load(z + row_in_z.to(tl.int64) * shape.z_stride + cols, mask=in_row & is_routed, other=0.0)
            product = product.to(tl.float32)
            if weights is not None:
                weight = tl.load(weights + row * shape.weights_stride + choice)
                product *= tl.where(is_routed, weight, 0.0)
            own_sum += product
        total = own_sum
        if received is not None:
            total = tl.zeros([BLOCK_N], tl.float32)
            for rank in tl.static_range(RANKS):
                source = received + rank * shape.rank_stride + row * shape.received_stride + cols
                part = tl.load(source, mask=in_row & (rank != shape.rank), other=0.0).to(tl.float32)
                total += tl.where(rank == shape.rank, own_sum.to(out.dtype.element_ty).to(tl.float32), part)
        tl.store(out + row * shape.out_stride + cols, total.to(out.dtype.element_ty), mask=in_row)
