"""Device functions that copy contiguous words between local memory and a peer's, by loads and stores or by bulk copies.

Loads and stores go through the registers of all threads; bulk copies go through shared memory, started by one thread.
Under the interpreter there is the first path only. The caller signals behind them, by `notify` (signals.py).
"""

import triton
import triton.language as tl

from overweave.ir.plan import INT32_BYTES
from overweave.memory.device.ptx import bulk_copy, bulk_shared_bytes
from overweave.memory.device.signals import INTERPRETED

# Buffers of a kernel that only copies take nearly all of 48 KiB; a kernel that computes needs shared memory for tiles.
ALONE_BYTES, BETWEEN_BYTES = 22 << 10, 16 << 10
BETWEEN_SHARED_BYTES = bulk_shared_bytes(BETWEEN_BYTES)
ALONE_ASSEMBLY = tl.constexpr(bulk_copy(ALONE_BYTES))
BETWEEN_ASSEMBLY = tl.constexpr(bulk_copy(BETWEEN_BYTES))
WORD_BYTES = tl.constexpr(INT32_BYTES)


@triton.jit
def add_elements(target, origin, count, BLOCK: tl.constexpr):
    """`target[:count] += origin[:count]` in fp32, by relaxed atomics at system scope: ranks may add in any order.

    A `notify` behind it releases the sums, as it releases stores.
    """
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < count
        values = tl.load(origin + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.atomic_add(target + offsets, values, mask=inside, sem="relaxed", scope="sys")


@triton.jit
def move_words(target, origin, count, BLOCK: tl.constexpr, BULK: tl.constexpr, ALONE: tl.constexpr):
    """`target[:count] = origin[:count]`, int32 words, both at multiples of 16 bytes, `count` a multiple of 4.

    BLOCK: words in flight at a time by loads and stores. BULK: by bulk copies, complete when this returns. ALONE: the
    kernel needs no shared memory for anything else.
    """
    if BULK and not INTERPRETED:
        tl.inline_asm_elementwise(
            ALONE_ASSEMBLY if ALONE else BETWEEN_ASSEMBLY,
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
