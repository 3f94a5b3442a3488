"""What a kernel does with signals: wait, notify, sound the alarm. The same face on the GPU and under the interpreter.

Two arrays come with every kernel that waits. `words` (int32, symmetric): the abort word, then one completed-calls word
per peer. `limits` (int64, local): how long a wait may take, where to report, and where the peers' `words` lie.

Contracts (each seen broken once, on Triton 3.6; docs/design/0002-device-protocol.md):
- notify: every thread's stores, then a block barrier, then one release at system scope.
- wait: a loop that ends in an acquire at system scope, a block barrier, a proxy fence; bounded, with one verdict.
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
# What the first one says: a wait of this GPU was void, or a peer's were, and that peer tells why.
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
def wait_at_least(word, wanted, words, limits):
    """1 once `word >= wanted` is seen, with everything its notifiers wrote before; 0 if the wait is void.

    A wait is void when its time is up or the abort word is set. The verdict is the same for the whole block.
    """
    if INTERPRETED:
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        stop = tl.atomic_add(words, 0, sem="acquire", scope="sys")
        while (seen - wanted < 0) & (stop == 0):
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            stop = tl.atomic_add(words, 0, sem="acquire", scope="sys")
        verdict = (seen - wanted >= 0).to(tl.int32)
    else:
        verdict = tl.inline_asm_elementwise(
            WAIT_ASSEMBLY if has_bulk_copies() else WAIT_ASSEMBLY_BEFORE_SM90,
            "=r,l,r,l,l",
            [word, wanted, words, tl.load(limits + TIMEOUT_NS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return verdict


@triton.jit
def wait_for_signals(signals, low, high, count, also, also_count, operation, words, limits, world_size):
    """Waits until the signals `[low, high)` have reached `count`, and `also` (if not negative) its own; 1 if all did.

    Sounds the alarm if one did not.
    """
    verdict = 1
    for place in range(low, high + (also >= 0).to(tl.int32)):
        if verdict == 1:
            signal = tl.where(place < high, place, also)
            wanted = tl.where(place < high, count, also_count)
            verdict = wait_at_least(signals + signal * STRIDE, wanted, words, limits)
            if verdict == 0:
                sound_alarm(signals + signal * STRIDE, wanted, operation, signal, words, limits, world_size)
    return verdict


@triton.jit
def wait_for_signals_at_once(signals, low, high, count, also, also_count, operation, words, limits, world_size):
    """The same, of a block: 32 signals at a time, each polled by a lane of its own. Where they are there already, all
    cost one latency of memory together.
    """
    if INTERPRETED:
        verdict = wait_for_signals(
            signals, low, high, count, also, also_count, operation, words, limits, world_size
        )  # fmt: skip
    else:
        verdict = 1
        end = high + (also >= 0).to(tl.int32)
        for first in range(low, end, LANES):
            if verdict == 1:
                places = first + tl.arange(0, LANES)
                signal = tl.where(places < high, places, also)
                wanted = tl.where(places < high, count, also_count)
                has_word = places < end
                each = tl.inline_asm_elementwise(
                    WAIT_FOR_EACH_ASSEMBLY if has_bulk_copies() else WAIT_FOR_EACH_ASSEMBLY_BEFORE_SM90,
                    "=r,l,r,l,l,r",
                    [
                        signals + tl.where(has_word, signal, 0) * STRIDE,
                        wanted,
                        words,
                        tl.load(limits + TIMEOUT_NS),
                        has_word.to(tl.int32),
                    ],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
                verdict = tl.min(each, 0)
        if verdict == 0:
            sound_alarm_of_late(signals, low, high, count, also, also_count, operation, words, limits, world_size)
    return verdict


@triton.jit
def sound_alarm_of_late(signals, low, high, count, also, also_count, operation, words, limits, world_size):
    """Sounds the alarm for the first of the signals that has not come."""
    late = tl.where(also >= 0, also, low)
    for passed in range(low, high):
        place = low + high - 1 - passed  # the first one last
        if tl.atomic_add(signals + place * STRIDE, 0, sem="acquire", scope="sys") - count < 0:
            late = place
    wanted = tl.where(late == also, also_count, count)
    sound_alarm(signals + late * STRIDE, wanted, operation, late, words, limits, world_size)


@triton.jit
def notify(signal, enabled):
    """Adds one to `signal`, after everything this block has stored is visible to every GPU."""
    tl.debug_barrier()
    tl.atomic_add(signal, 1, mask=enabled, sem="release", scope="sys")


@triton.jit
def sound_alarm(word, wanted, operation, signal, words, limits, world_size):
    """The first block whose wait is void writes the report and sets the abort word of every peer."""
    if claim_alarm(words, limits):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        report_alarm(operation, signal, wanted, seen, words, limits, world_size)


@triton.jit
def claim_alarm(words, limits):
    """Whether this block is the first of this rank's whose wait is void: then it has to report."""
    before = tl.atomic_cas(words, 0, ABORTED_HERE, sem="acq_rel", scope="sys")
    if before == ABORTED_BY_PEER:
        tl.store(tl.load(limits + REPORT_ADDRESS).to(tl.pointer_type(tl.int32)) + REPORT_IS_SET, ENDED_BY_PEER)
    return before == 0


@triton.jit
def report_alarm(operation, signal, wanted, seen, words, limits, world_size):
    """Writes the report and sets the abort word of every peer."""
    report = tl.load(limits + REPORT_ADDRESS).to(tl.pointer_type(tl.int32))
    tl.store(report + REPORT_OPERATION, operation)
    tl.store(report + REPORT_SIGNAL, signal)
    tl.store(report + REPORT_EXPECTED, wanted)
    tl.store(report + REPORT_SEEN, seen)
    tl.debug_barrier()
    tl.atomic_xchg(report + REPORT_IS_SET, REPORTED, sem="release", scope="sys")
    for peer in range(world_size):
        peer_words = tl.load(limits + PEER_ADDRESSES + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_cas(peer_words, 0, ABORTED_BY_PEER, sem="acq_rel", scope="sys")


@triton.jit
def satisfy_all(signals, signal_count):
    """Satisfies whatever waits for one of the first signals of a slot, as streams do, which poll no abort word.

    A reset clears those that plans have (memory/cuda/workspace.py), and no others.
    """
    for first in range(0, signal_count, LANES):
        place = first + tl.arange(0, LANES)
        satisfied = tl.full([LANES], SATISFIED, tl.int32)
        tl.atomic_max(signals + place * STRIDE, satisfied, mask=place < signal_count, sem="relaxed", scope="sys")


@triton.jit
def read_clock():
    """Nanoseconds of the device clock."""
    return tl.inline_asm_elementwise(CLOCK_ASSEMBLY, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
