"""Device functions on signals: wait, notify, report a timeout. The same on the GPU and under the interpreter.

Every kernel that waits takes two arrays. `words` (int32, symmetric): the abort word, then one completed-calls word per
peer. `limits` (int64, local): how long a wait may take, address of the report, addresses of the peers' `words`.

A wait returns a status: 1 if it was satisfied, 0 if it timed out or was aborted.

Contracts (each seen broken once, on Triton 3.6; docs/design/0002-device-protocol.md):
- notify: every thread's stores, then a block barrier, then one release at system scope.
- wait: a loop that ends in an acquire at system scope, a block barrier, a proxy fence; bounded, one status a block.
"""

import triton
import triton.language as tl

from overweave.compat.triton_names import has_bulk_copies
from overweave.memory.device.ptx import (
    READ_CLOCK,
    WAIT_UNTIL_AT_LEAST,
    WAIT_UNTIL_EACH_AT_LEAST,
    WARP_LANES,
    before_hopper,
)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
WAIT_ASSEMBLY = tl.constexpr(WAIT_UNTIL_AT_LEAST)
WAIT_FOR_EACH_ASSEMBLY = tl.constexpr(WAIT_UNTIL_EACH_AT_LEAST)
WAIT_ASSEMBLY_BEFORE_SM90 = tl.constexpr(before_hopper(WAIT_UNTIL_AT_LEAST))
WAIT_FOR_EACH_ASSEMBLY_BEFORE_SM90 = tl.constexpr(before_hopper(WAIT_UNTIL_EACH_AT_LEAST))
LANES = tl.constexpr(WARP_LANES)
CLOCK_ASSEMBLY = tl.constexpr(READ_CLOCK)

# One word per 128-byte line, as in memory/layout.py (SIGNAL_STRIDE_WORDS).
STRIDE = tl.constexpr(32)

# Positions in `words`, in strides.
ABORT = tl.constexpr(0)
COMPLETED = tl.constexpr(1)

# Positions in `limits`.
TIMEOUT_NS = tl.constexpr(0)
REPORT_ADDRESS = tl.constexpr(1)
PEER_ADDRESSES = tl.constexpr(2)

# Positions in the report, int32 words of pinned host memory. The first is written last.
REPORT_IS_SET = tl.constexpr(0)
REPORT_OPERATION = tl.constexpr(1)
REPORT_SIGNAL = tl.constexpr(2)
REPORT_EXPECTED = tl.constexpr(3)
REPORT_SEEN = tl.constexpr(4)
# Values of the first one: a wait of this GPU timed out, or a peer's did, which has a report of its own.
REPORTED = tl.constexpr(1)
ENDED_BY_PEER = tl.constexpr(2)

# Columns of a trace: int64 nanoseconds per tile.
CLAIMED = tl.constexpr(0)
READY = tl.constexpr(1)
STORED = tl.constexpr(2)
MULTIPLIED = tl.constexpr(3)  # of tiles with addends: the product is done; of the Hopper kernel's others: and ended
RECEIVED = tl.constexpr(4)  # of tiles with addends: what it waited for is here
BEGUN = tl.constexpr(5)  # of the first tile of a program of the Hopper kernel: the program began
PARTED = tl.constexpr(6)  # and: its barriers were made and its partitions had started
TRACE_COLUMNS = tl.constexpr(7)

SATISFIED = tl.constexpr(0x3FFFFFFF)  # a signal: above every count, below the sign bit
ABORTED_HERE = tl.constexpr(1)
ABORTED_BY_PEER = tl.constexpr(2)


@triton.jit
def wait_at_least(word, expected, words, limits):
    """Wait until `word >= expected`, in acquire order. Return 1; 0 at the deadline or if the abort word is set.

    The status is the same for the whole block.
    """
    if INTERPRETED:
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        stop = tl.atomic_add(words, 0, sem="acquire", scope="sys")
        while (seen - expected < 0) & (stop == 0):
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            stop = tl.atomic_add(words, 0, sem="acquire", scope="sys")
        status = (seen - expected >= 0).to(tl.int32)
    else:
        status = tl.inline_asm_elementwise(
            WAIT_ASSEMBLY if has_bulk_copies() else WAIT_ASSEMBLY_BEFORE_SM90,
            "=r,l,r,l,l",
            [word, expected, words, tl.load(limits + TIMEOUT_NS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return status


@triton.jit
def wait_for_signals(signals, low, high, count, also, also_count, operation, words, limits, world_size):
    """Wait until signals `[low, high)` have reached `count`, and `also` (if not negative) `also_count`.

    Return the status; report the timeout if it is 0.
    """
    status = 1
    for index in range(low, high + (also >= 0).to(tl.int32)):
        if status == 1:
            signal = tl.where(index < high, index, also)
            expected = tl.where(index < high, count, also_count)
            status = wait_at_least(signals + signal * STRIDE, expected, words, limits)
            if status == 0:
                report_timeout(signals + signal * STRIDE, expected, operation, signal, words, limits, world_size)
    return status


@triton.jit
def wait_for_signals_by_lanes(signals, low, high, count, also, also_count, operation, words, limits, world_size):
    """`wait_for_signals`, 32 signals at a time, each polled by a lane of its own: one memory latency if all are set."""
    if INTERPRETED:
        status = wait_for_signals(
            signals, low, high, count, also, also_count, operation, words, limits, world_size
        )  # fmt: skip
    else:
        status = 1
        end = high + (also >= 0).to(tl.int32)
        for first in range(low, end, LANES):
            if status == 1:
                indices = first + tl.arange(0, LANES)
                signal = tl.where(indices < high, indices, also)
                expected = tl.where(indices < high, count, also_count)
                has_word = indices < end
                each = tl.inline_asm_elementwise(
                    WAIT_FOR_EACH_ASSEMBLY if has_bulk_copies() else WAIT_FOR_EACH_ASSEMBLY_BEFORE_SM90,
                    "=r,l,r,l,l,r",
                    [
                        signals + tl.where(has_word, signal, 0) * STRIDE,
                        expected,
                        words,
                        tl.load(limits + TIMEOUT_NS),
                        has_word.to(tl.int32),
                    ],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
                status = tl.min(each, 0)
        if status == 0:
            report_first_late(signals, low, high, count, also, also_count, operation, words, limits, world_size)
    return status


@triton.jit
def report_first_late(signals, low, high, count, also, also_count, operation, words, limits, world_size):
    """Report a timeout of the first signal that has not reached its count."""
    late = tl.where(also >= 0, also, low)
    for step in range(low, high):
        signal = low + high - 1 - step  # downwards: the lowest late signal wins
        if tl.atomic_add(signals + signal * STRIDE, 0, sem="acquire", scope="sys") - count < 0:
            late = signal
    expected = tl.where(late == also, also_count, count)
    report_timeout(signals + late * STRIDE, expected, operation, late, words, limits, world_size)


@triton.jit
def notify(signal, enabled):
    """Add one to `signal` in release order: everything this block has stored is visible to every GPU before."""
    tl.debug_barrier()
    tl.atomic_add(signal, 1, mask=enabled, sem="release", scope="sys")


@triton.jit
def report_timeout(word, expected, operation, signal, words, limits, world_size):
    """Write the report and set the abort word of every rank, if this block's wait is the first that timed out."""
    if claim_report(words, limits):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        write_report(operation, signal, expected, seen, words, limits, world_size)


@triton.jit
def claim_report(words, limits):
    """Set this rank's abort word; return whether it was clear, so that this block has to report."""
    previous = tl.atomic_cas(words, 0, ABORTED_HERE, sem="acq_rel", scope="sys")
    if previous == ABORTED_BY_PEER:
        tl.store(tl.load(limits + REPORT_ADDRESS).to(tl.pointer_type(tl.int32)) + REPORT_IS_SET, ENDED_BY_PEER)
    return previous == 0


@triton.jit
def write_report(operation, signal, expected, seen, words, limits, world_size):
    """Write the report and set the abort word of every rank."""
    report = tl.load(limits + REPORT_ADDRESS).to(tl.pointer_type(tl.int32))
    tl.store(report + REPORT_OPERATION, operation)
    tl.store(report + REPORT_SIGNAL, signal)
    tl.store(report + REPORT_EXPECTED, expected)
    tl.store(report + REPORT_SEEN, seen)
    tl.debug_barrier()
    tl.atomic_xchg(report + REPORT_IS_SET, REPORTED, sem="release", scope="sys")
    for peer in range(world_size):
        peer_words = tl.load(limits + PEER_ADDRESSES + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_cas(peer_words, 0, ABORTED_BY_PEER, sem="acq_rel", scope="sys")


@triton.jit
def satisfy_all(signals, signal_count):
    """Satisfy all waits for the first `signal_count` signals of a slot: stream waits do not poll the abort word.

    A reset clears the signals that plans use (memory/cuda/workspace.py), and no others.
    """
    for first in range(0, signal_count, LANES):
        index = first + tl.arange(0, LANES)
        satisfied = tl.full([LANES], SATISFIED, tl.int32)
        tl.atomic_max(signals + index * STRIDE, satisfied, mask=index < signal_count, sem="relaxed", scope="sys")


@triton.jit
def read_clock():
    """Return nanoseconds of the device clock."""
    return tl.inline_asm_elementwise(CLOCK_ASSEMBLY, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
