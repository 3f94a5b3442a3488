"""Moves contiguous words between two places of memory, one of which may be a peer's: the same face for both data paths.

Loads and stores go through the registers of all threads; bulk copies go through shared memory, started by one thread.
Under the interpreter there is the first path only. Nothing is announced here: `notify` (memory/device.py) does that.
"""

import triton
import triton.language as tl

from overweave.memory.device import INTERPRETED
from overweave.memory.ptx import BULK_COPY

BULK_ASSEMBLY = tl.constexpr(BULK_COPY)
WORD_BYTES = tl.constexpr(4)


@triton.jit
def move_words(target, origin, count, BLOCK: tl.constexpr, BULK: tl.constexpr):
    """`target[:count] = origin[:count]`, int32 words, both at multiples of 16 bytes, `count` a multiple of 4.

    BLOCK: words that are under way at a time by loads and stores. BULK: by bulk copies, complete when this returns.
    """
    if BULK and not INTERPRETED:
        tl.inline_asm_elementwise(
            BULK_ASSEMBLY,
            "=r,l,l,r",
            [target, origin, count * WORD_BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for start in range(0, count, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < count
            tl.store(target + offsets, tl.load(origin + offsets, mask=inside), mask=inside)
