"""Fills the result of a failed call with NaN."""

import triton
import triton.language as tl

from overweave.memory.device.signals import ABORT, STRIDE


@triton.jit
def void_kernel(words, out, elements, BLOCK: tl.constexpr):
    """Fill `out` with NaN if the abort word (words[0]) is set: a wait of this rank, or of a peer, has failed."""
    if tl.load(words + ABORT * STRIDE, volatile=True) != 0:
        for first in range(tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
            offsets = tl.full((), 0, tl.int64) + first + tl.arange(0, BLOCK)
            nan = tl.full([BLOCK], float("nan"), tl.float32).to(out.dtype.element_ty)
            tl.store(out + offsets, nan, mask=offsets < elements)
