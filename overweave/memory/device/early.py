"""A kernel that starts before the one in front of it on the stream ends: programmatic dependent launch, from sm_90 on.

The kernel in front says when the next may start (`let_next_begin`): it does so once every program has said it, or has
ended, so all of them are resident and none can be kept from its SM. The next one must not touch what kernel in front
writes before `await_previous` returns, which is when that has ended and its stores are there. What kernels before both
wrote is there from the beginning, if the kernel in front was launched in the ordinary way.
SOURCE: PTX ISA, griddepcontrol; CUDA C++ programming guide, programmatic dependent launch and synchronization.
"""

import triton
import triton.language as tl

from overweave.memory.device.ptx import AWAIT_PREVIOUS_KERNEL, FETCH_TO_L2, LET_NEXT_KERNEL_BEGIN
from overweave.memory.device.signals import INTERPRETED

LET_ASSEMBLY = tl.constexpr(LET_NEXT_KERNEL_BEGIN)
AWAIT_ASSEMBLY = tl.constexpr(AWAIT_PREVIOUS_KERNEL)
FETCH_ASSEMBLY = tl.constexpr(FETCH_TO_L2)
LINE_BYTES = tl.constexpr(128)


@triton.jit
def let_next_begin():
    """The next kernel on the stream, if it was launched to start early, may do so once all programs have said this."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(LET_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_previous():
    """Returns when the kernel in front has ended; at once where this one was launched in the ordinary way."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(AWAIT_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_lines(addresses, inside):
    """Has the lines that hold `addresses` brought to the L2 cache, where they are `inside`; waits for nothing."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            FETCH_ASSEMBLY, "=r,l,r", [addresses, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
