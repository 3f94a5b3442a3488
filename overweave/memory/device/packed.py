"""Packed messages: 12 bytes of data and a flag of 4, so that one store carries both and no release is needed.

A message belongs to one call: its flag is that call's epoch, and a reader that finds another one keeps looking. On the
GPU a message is one access of 128 bits (memory/device/ptx.py). Under the interpreter, which has none, the flag is
stored behind the data and read before it. Who may overwrite what, and when: docs/design/0002-device-protocol.md.

SOURCE: the LL protocol of NCCL, whose messages are 8 bytes, half of them data, because 8 bytes arrive whole anywhere.
"""

import triton
import triton.language as tl

from overweave.memory.device.ptx import PUSH_PACKED
from overweave.memory.device.signals import INTERPRETED

PUSH_ASSEMBLY = tl.constexpr(PUSH_PACKED)
MESSAGE_BYTES = tl.constexpr(16)
PACKED_OPERATION = tl.constexpr(-2)  # the `operation` a report names when a peer's messages did not come
DATA_WORDS = tl.constexpr(3)  # int32, in front of the flag

# `state`, one int64 word of local memory: epochs that have begun and all ended, and of the next one, tickets taken.
EPOCH_SHIFT = tl.constexpr(32)


@triton.jit
def take_ticket(state, programs):
    """(epoch, place): the epoch of this call, and which of its `programs` this one is, in the order of arrival.

    Whoever comes last has the state ready for the next call: all others have read it by then.
    """
    ticket = tl.atomic_add(state, tl.full([], 1, tl.int64), sem="relaxed", scope="gpu")
    begun = ticket >> EPOCH_SHIFT
    place = (ticket & 0xFFFFFFFF).to(tl.int32)
    if place == programs - 1:
        tl.atomic_xchg(state, (begun + 1) << EPOCH_SHIFT, sem="relaxed", scope="gpu")
    return begun.to(tl.int32) + 1, place


@triton.jit
def push_message(address, first, second, third, epoch, inside):
    """Stores one message at each address that is `inside`."""
    if INTERPRETED:
        words = address.to(tl.pointer_type(tl.int32))
        tl.store(words, first, mask=inside)
        tl.store(words + 1, second, mask=inside)
        tl.store(words + 2, third, mask=inside)
        tl.atomic_xchg(words + 3, tl.zeros_like(first) + epoch, mask=inside, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            PUSH_ASSEMBLY,
            "=r,l,r,r,r,r,r",
            [address, first, second, third, epoch, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def poll_messages(
    address,
    stride,
    own,
    epoch,
    inside,
    words,
    timeout_ns,
    SENDERS: tl.constexpr,
    POLL: tl.constexpr,
    HELD: tl.constexpr,
):
    """The messages of all ranks but `own`: three words of each, in the order of ranks, then which one is missing.

    address: where each message lies in the part of rank 0. POLL, HELD: the assembly for so many SENDERS and its
    constraints. Each element waits for its own messages, until the time is up or the abort word is set: then the
    missing sender counts from one.
    """
    if INTERPRETED:
        return _poll_interpreted(address, stride, own, epoch, inside, words, SENDERS)
    else:
        return tl.inline_asm_elementwise(
            POLL,
            HELD,
            [address, stride, own, epoch, inside.to(tl.int32), words, timeout_ns],
            dtype=(tl.int32,) * (3 * SENDERS + 1),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _poll_interpreted(address, stride, own, epoch, inside, words, SENDERS):
    missing = tl.zeros_like(inside.to(tl.int32))
    found = ()
    for sender in tl.static_range(SENDERS):
        rank = tl.where(sender >= own, sender + 1, sender)
        message = (address + rank * stride).to(tl.pointer_type(tl.int32))
        flag = tl.atomic_add(message + 3, tl.zeros_like(missing), mask=inside, sem="acquire", scope="sys")
        stop = tl.atomic_add(words, 0, sem="acquire", scope="sys")
        while (tl.sum(((flag != epoch) & inside).to(tl.int32), 0) > 0) & (stop == 0):
            flag = tl.atomic_add(message + 3, tl.zeros_like(missing), mask=inside, sem="acquire", scope="sys")
            stop = tl.atomic_add(words, 0, sem="acquire", scope="sys")
        missing = tl.where((flag != epoch) & inside, sender + 1, missing)
        for index in tl.static_range(DATA_WORDS):
            found += (tl.load(message + index, mask=inside, other=0),)
    found += (missing,)
    return found
