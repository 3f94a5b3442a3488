"""The head of every call: give credits for finished calls, take those this call needs. One block, one kernel.

All words only grow and live in device memory, so a captured graph replays as well as it runs eagerly:

    epoch             calls begun on this rank so far
    completed[peer]   calls that a peer has finished (written by the peer, into our symmetric memory)

Calls of one workspace follow each other in stream order on every rank, in the same sequence. So at the head of call e
this rank has finished all calls before e: it zeroes the signals it has read, then tells every peer `completed = e - 1`
(the credit). Then it waits until every peer has told the same: it has finished the call before, so what that used may
be written, and it has begun this one, so its host owes this call nothing any more. Only then may kernels fill the SMs
and wait for peers. Without that, a host could stand still for another library's kernel (a driver that needs memory for
a graph waits until all kernels of its GPU have ended), which waits for the SMs of a peer, whose kernel of ours waits
for this host. One block that waits leaves the SMs to everybody. Nothing trails a call.
"""

import triton
import triton.language as tl

from overweave.memory.device.signals import (
    COMPLETED,
    PEER_ADDRESSES,
    STRIDE,
    satisfy_all,
    sound_alarm,
    wait_at_least,
    wait_for_signals_at_once,
)

# Positions in `state`, int64 words of local memory.
EPOCH = tl.constexpr(0)
USED_ADDRESS = tl.constexpr(1)
USED_SIGNALS = tl.constexpr(2)
STATE_WORDS = 3

BEGIN_OPERATION = tl.constexpr(-1)  # the `operation` a report names when a credit did not come
QUEUE_OPERATION = tl.constexpr(-3)  # and where a queue waits, of which no more is known (runtime/gpu/waits.py)
WAIT_NUMBERS = ("low", "high", "count", "also", "also_count", "operation", "signal_count", "world_size")


@triton.jit
def begin_kernel(state, signals, claims, words, limits, signal_count, rank, world_size, BLOCK: tl.constexpr):
    """See the module. `signals`: those of this call's slot. `claims`: [4] tile counters. At most BLOCK ranks."""
    # All that is read comes first, so that the loads are under way together: a head is a chain of memory latencies.
    peers = tl.arange(0, BLOCK)
    is_peer = peers < world_size
    epoch = tl.load(state + EPOCH) + 1
    previous = (epoch - 1).to(tl.int32)
    used = tl.load(state + USED_ADDRESS).to(tl.pointer_type(tl.int32))
    used_count = tl.load(state + USED_SIGNALS)
    stopped = tl.atomic_add(words, 0, sem="relaxed", scope="sys")
    addresses = tl.load(limits + PEER_ADDRESSES + peers, mask=is_peer, other=0)

    # The signals that the last call used have all been waited for: nobody will add to them before our credit. Behind
    # the abort they stay as the watcher has set them: streams still wait for them, in calls that were launched before.
    for start in range(0, used_count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(used + index * STRIDE, tl.zeros([BLOCK], tl.int32), mask=(index < used_count) & (stopped == 0))
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
    # Added to a tensor: a count of one arrives as a plain number.
    tl.store(state + USED_SIGNALS, tl.zeros([], tl.int64) + signal_count)

    # One look at all peers' credits; only those that are late are waited for.
    received = words + (COMPLETED + peers) * STRIDE
    seen = tl.atomic_add(received, tl.zeros([BLOCK], tl.int32), mask=is_peer, sem="acquire", scope="sys")
    late = tl.sum(((seen - previous < 0) & is_peer).to(tl.int32), 0)
    verdict = 1
    if late > 0:
        for peer in range(world_size):
            if verdict == 1:
                word = words + (COMPLETED + peer) * STRIDE
                verdict = wait_at_least(word, previous, words, limits)
                if verdict == 0:
                    sound_alarm(word, previous, BEGIN_OPERATION, peer, words, limits, world_size)


@triton.jit
def tell_kernel(words, BLOCK: tl.constexpr):
    """Sets words of any ranks, at most BLOCK, to 1, behind all that stands before it in its stream.

    words: their addresses, int64 `[BLOCK]`, 0 for none. One launch, for library calls that have several peers to tell.
    MEASURED: a stream write of the driver takes 3.2 us (`flag` of campaigns.rates.gpu_latencies, 2 x H200, 2026-11-20),
    and one would stand behind the other.
    """
    addresses = tl.load(words + tl.arange(0, BLOCK))
    tl.debug_barrier()
    flags = addresses.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, tl.full([BLOCK], 1, tl.int32), mask=addresses != 0, sem="release", scope="sys")


@triton.jit(do_not_specialize=WAIT_NUMBERS)  # compiled once for all waits
def wait_kernel(signals, words, limits, low, high, count, also, also_count, operation, signal_count, world_size):
    """A wait in the caller's stream, by one warp, for what follows and cannot wait itself, such as a library's matmul.

    A stream can wait on its own, too, but nobody gives such a wait up, and whoever ends it needs the driver, which may
    be held up (docs/design/0002-device-protocol.md, "How waits end").

    Ends when the own signals `[low, high)` have reached `count`, and `also` (if not negative) its own, or when the
    wait is void: then streams beside the caller's end theirs. signals: of the slot, so many. operation: for a report.
    """
    verdict = wait_for_signals_at_once(
        signals, low, high, count, also, also_count, operation, words, limits, world_size
    )  # fmt: skip
    if verdict == 0:
        satisfy_all(signals, signal_count)
