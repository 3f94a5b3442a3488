"""The prologue of every call: send credits for finished calls, wait for those of the peers. One kernel of one block.

All words only grow and live in device memory, so a captured graph replays as well as it runs eagerly:

    epoch             calls begun on this rank so far
    completed[peer]   calls that a peer has finished (written by the peer, into our symmetric memory)

Calls of one workspace follow each other in stream order on every rank, in the same sequence. So in the prologue of call
e this rank has finished all calls before e. It zeroes the signals that it has read, then writes `completed = e - 1` on
every peer (the credit), and waits for the credits of all peers. A credit says that the peer has finished the call
before, so that its memory may be written, and that the peer's host has enqueued this call. Only then may kernels fill
the SMs and wait for peers. Otherwise there could be a deadlock of three: a host blocks in the driver (which needs
memory for a graph, and waits until all kernels of its GPU have ended), one of these is a kernel of NCCL, say, which
waits for SMs on a peer, and these are held by our kernel, which waits for the blocked host. A prologue of one block
leaves the SMs free. A call has no epilogue.
"""

import triton
import triton.language as tl

from overweave.memory.device.ptx import LAUNCH_DEPENDENTS, PREFETCH_TO_L2, WAIT_FOR_PREVIOUS_KERNEL
from overweave.memory.device.signals import (
    COMPLETED,
    INTERPRETED,
    PEER_ADDRESSES,
    STRIDE,
    read_clock,
    report_timeout,
    satisfy_all,
    wait_at_least,
    wait_for_signals_by_lanes,
)

# The next kernel starts once every program of the kernel in front has called `launch_dependents`, or has ended: so all
# of them have their SMs. The next kernel must not access what the kernel in front writes before
# `wait_for_previous_kernel` returns: then that kernel has ended and its stores are visible. Stores of kernels before
# both are visible from the start if the kernel in front was launched in the ordinary way.
# SOURCE: PTX ISA, griddepcontrol; CUDA C++ programming guide, programmatic dependent launch and synchronization.

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


# The kernel notifies every peer, waits for all of them, and reads the device clock. Ranks leave within the time that a
# store takes to cross NVLink, about 1 us.

# Positions in `state`, int64 words.
ROUND = tl.constexpr(0)
CLOCK = tl.constexpr(1)


@triton.jit
def stamp_kernel(state, addresses, signals, words, limits, rank, world_size):
    """Run the barrier and store the clock. signals: one word per peer. addresses: of each rank's signals. One block."""
    round_number = (tl.load(state + ROUND) + 1).to(tl.int32)
    for peer in range(world_size):
        peer_signals = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(peer_signals + rank * STRIDE, round_number, sem="release", scope="sys")
    for peer in range(world_size):
        wait_at_least(signals + peer * STRIDE, round_number, words, limits)
    tl.store(state + ROUND, round_number.to(tl.int64))
    tl.store(state + CLOCK, read_clock())


# Positions in `state`, int64 words of local memory.
EPOCH = tl.constexpr(0)
USED_ADDRESS = tl.constexpr(1)
USED_SIGNALS = tl.constexpr(2)
STATE_WORDS = 3

BEGIN_OPERATION = tl.constexpr(-1)  # the `operation` of a report when a credit did not come
QUEUE_OPERATION = tl.constexpr(-3)  # and when a stream waits on behalf of a queue (runtime/gpu/launcher.py)
WAIT_NUMBERS = ("low", "high", "count", "also", "also_count", "operation", "signal_count", "world_size")


@triton.jit
def begin_kernel(state, signals, claims, words, limits, signal_count, rank, world_size, BLOCK: tl.constexpr):
    """Run the prologue of a call: zero the last call's signals, send every peer a credit, wait for a credit of each.

    A credit is the number of calls that the sender has finished. One block. signals: of this call's slot,
    `signal_count`. claims: [4] work counters, zeroed. At most BLOCK ranks. Reports a peer whose credit is late.
    """
    # All loads come first, so that they are in flight together: a prologue is a chain of memory latencies.
    peers = tl.arange(0, BLOCK)
    is_peer = peers < world_size
    epoch = tl.load(state + EPOCH) + 1
    previous = (epoch - 1).to(tl.int32)
    used_signals = tl.load(state + USED_ADDRESS).to(tl.pointer_type(tl.int32))
    used_count = tl.load(state + USED_SIGNALS)
    stopped = tl.atomic_add(words, 0, sem="relaxed", scope="sys")
    addresses = tl.load(limits + PEER_ADDRESSES + peers, mask=is_peer, other=0)

    # The last call has waited for all signals that it used: no peer adds to them before our credit. After an abort they
    # stay as the watcher has set them: streams of calls that were launched before still wait for them.
    for start in range(0, used_count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(used_signals + index * STRIDE, tl.zeros([BLOCK], tl.int32), mask=(index < used_count) & (stopped == 0))
    tl.store(claims, 0)
    tl.store(claims + 1, 0)
    tl.store(claims + 2, 0)
    tl.store(claims + 3, 0)
    tl.debug_barrier()

    # One lane per peer: the credits leave together, each released by its own lane behind the block's barrier.
    credits = addresses.to(tl.pointer_type(tl.int32)) + (COMPLETED + rank) * STRIDE
    completed = tl.zeros([BLOCK], tl.int32) + previous
    tl.atomic_xchg(credits, completed, mask=is_peer, sem="release", scope="sys")

    tl.store(state + EPOCH, epoch)
    tl.store(state + USED_ADDRESS, signals.to(tl.int64))
    # Triton passes an argument of 1 as a constexpr: added to a tensor it is one.
    tl.store(state + USED_SIGNALS, tl.zeros([], tl.int64) + signal_count)

    # Read all peers' credits at once; wait for late ones only.
    received = words + (COMPLETED + peers) * STRIDE
    seen = tl.atomic_add(received, tl.zeros([BLOCK], tl.int32), mask=is_peer, sem="acquire", scope="sys")
    late = tl.sum(((seen - previous < 0) & is_peer).to(tl.int32), 0)
    status = 1
    if late > 0:
        for peer in range(world_size):
            if status == 1:
                word = words + (COMPLETED + peer) * STRIDE
                status = wait_at_least(word, previous, words, limits)
                if status == 0:
                    report_timeout(word, previous, BEGIN_OPERATION, peer, words, limits, world_size)


@triton.jit
def tell_kernel(words, BLOCK: tl.constexpr):
    """Set signals of any ranks, at most BLOCK, to 1, in stream order.

    words: their addresses, int64 `[BLOCK]`, 0 for none. One launch notifies several peers of a cuBLAS or NCCL call.
    MEASURED: a stream write of the driver takes 3.2 us (`flag` of `overweave calibrate`, 2 x H200, 2026-11-20),
    and several would run one after the other.
    """
    addresses = tl.load(words + tl.arange(0, BLOCK))
    tl.debug_barrier()
    flags = addresses.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, tl.full([BLOCK], 1, tl.int32), mask=addresses != 0, sem="release", scope="sys")


@triton.jit(do_not_specialize=WAIT_NUMBERS)  # compiled once for all waits
def wait_kernel(signals, words, limits, low, high, count, also, also_count, operation, signal_count, world_size):
    """Wait in the caller's stream, by one warp, for the sake of a kernel that cannot wait itself, such as cuBLAS's.

    A stream wait of the driver would do, too, but has no deadline, and to end it takes a driver call, which may block
    (docs/design/0002-device-protocol.md, "How waits end").

    Ends when this rank's signals `[low, high)` have reached `count`, and `also` (if not negative) `also_count`. If the
    wait times out or is aborted, it satisfies the waits of side streams, too. signals: of the slot, `signal_count`.
    operation: for the report.
    """
    status = wait_for_signals_by_lanes(
        signals, low, high, count, also, also_count, operation, words, limits, world_size
    )  # fmt: skip
    if status == 0:
        satisfy_all(signals, signal_count)
