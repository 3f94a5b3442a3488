"""Programmatic dependent launch, from sm_90 on: a kernel starts before the kernel in front of it on the stream ends.

The next kernel starts once every program of the kernel in front has called `launch_dependents`, or has ended: so all of
them have their SMs. The next kernel must not access what the kernel in front writes before `wait_for_previous_kernel`
returns: then that kernel has ended and its stores are visible. Stores of kernels before both are visible from the start
if the kernel in front was launched in the ordinary way.
SOURCE: PTX ISA, griddepcontrol; CUDA C++ programming guide, programmatic dependent launch and synchronization.
"""

import triton
import triton.language as tl

from overweave.memory.device.ptx import LAUNCH_DEPENDENTS, PREFETCH_TO_L2, WAIT_FOR_PREVIOUS_KERNEL
from overweave.memory.device.signals import INTERPRETED

LAUNCH_ASSEMBLY = tl.constexpr(LAUNCH_DEPENDENTS)
WAIT_ASSEMBLY = tl.constexpr(WAIT_FOR_PREVIOUS_KERNEL)
PREFETCH_ASSEMBLY = tl.constexpr(PREFETCH_TO_L2)
LINE_BYTES = tl.constexpr(128)


@triton.jit
def launch_dependents():
    """Allow the next kernel on the stream to start, if it was launched so, once all programs have executed this."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(LAUNCH_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_previous_kernel():
    """Wait until the kernel in front has ended; return at once if this one was launched in the ordinary way."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(WAIT_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_lines(addresses, inside):
    """Prefetch the cache lines of `addresses` into L2, where `inside`; do not wait."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            PREFETCH_ASSEMBLY, "=r,l,r", [addresses, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
