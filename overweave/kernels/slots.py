"""Sums over the slots of tokens: the weighed products of a token's experts, and what other ranks have of the token."""

import triton
import triton.language as tl


@triton.jit
def add_slots_kernel(
    z,
    places,
    routed,
    weights,
    landed,
    out,
    shape,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """out[row] = sum over slots of weights[row, slot] * z[places[row, slot]], in fp32, slot by slot, rounded.

    shape: SlotsShape. z: rows of products. places: int32 `[rows, SLOTS]`; one from `routed` on, an int32, is of no
    expert and not read. weights: fp32 `[rows, SLOTS]`; None: 1. landed: None, or of RANKS ranks `[RANKS, rows, cols]`
    what each has of a row, the own one's but a place: all are added in fp32, in the order of ranks, and rounded once.
    A program adds a block of columns of a row at a time.
    """
    count = tl.load(routed)
    across = tl.cdiv(shape.cols, BLOCK)
    for task in range(tl.program_id(0), shape.rows * across, tl.num_programs(0)):
        row = (task // across).to(tl.int64)
        cols = task % across * BLOCK + tl.arange(0, BLOCK)
        inside = cols < shape.cols
        own = tl.zeros([BLOCK], tl.float32)
        for slot in tl.static_range(SLOTS):
            place = tl.load(places + row * SLOTS + slot)
            is_there = place < count
            product = tl.load(z + place.to(tl.int64) * shape.z_step + cols, mask=inside & is_there, other=0.0)
            product = product.to(tl.float32)
            if weights is not None:
                weight = tl.load(weights + row * shape.weights_step + slot)
                product *= tl.where(is_there, weight, 0.0)
            own += product
        total = own
        if landed is not None:
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(RANKS):
                at = landed + rank * shape.rank_step + row * shape.landed_step + cols
                part = tl.load(at, mask=inside & (rank != shape.rank), other=0.0).to(tl.float32)
                total += tl.where(rank == shape.rank, own.to(out.dtype.element_ty).to(tl.float32), part)
        tl.store(out + row * shape.out_step + cols, total.to(out.dtype.element_ty), mask=inside)
