"""Packed messages: 12 bytes of data and a flag of 4, so that one store carries both and no release is needed.

The flag of a message is the epoch of its call; a reader polls until it sees that epoch. On the GPU a message is one
access of 128 bits (memory/device/ptx.py). Under the interpreter, which has none, the flag is stored behind the data and
read before it. docs/design/0002-device-protocol.md says when a message may be overwritten.

SOURCE: the LL protocol of NCCL, whose messages are 8 bytes, half of them data, because 8 bytes arrive whole anywhere.
"""

import triton
import triton.language as tl

from overweave.memory.device.ptx import PUSH_PACKED
from overweave.memory.device.signals import INTERPRETED

PUSH_ASSEMBLY = tl.constexpr(PUSH_PACKED)
MESSAGE_BYTES = tl.constexpr(16)
PACKED_OPERATION = tl.constexpr(-2)  # the `operation` of a report when a peer's messages did not come
DATA_WORDS = tl.constexpr(3)  # int32, in front of the flag

# `state`, one int64 word of local memory: finished epochs above this bit, below it the tickets taken of the next one.
EPOCH_SHIFT = tl.constexpr(32)


@triton.jit
def take_ticket(state, programs):
    """Return (epoch, index): the epoch of this call, and this program's index among `programs`, in arrival order.

    The last program sets the state for the next call: all others have read it by then.
    """
    ticket = tl.atomic_add(state, tl.full([], 1, tl.int64), sem="relaxed", scope="gpu")
    begun = ticket >> EPOCH_SHIFT
    index = (ticket & 0xFFFFFFFF).to(tl.int32)
    if index == programs - 1:
        tl.atomic_xchg(state, (begun + 1) << EPOCH_SHIFT, sem="relaxed", scope="gpu")
    return begun.to(tl.int32) + 1, index


@triton.jit
def push_message(address, first, second, third, epoch, inside):
    """Store one message at each address, where `inside`."""
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
    CONSTRAINTS: tl.constexpr,
):
    """Poll the messages of all ranks but `own`. Return three words of each, in rank order, then the missing sender.

    address: of each message in the part of rank 0. POLL, CONSTRAINTS: the assembly for so many SENDERS. Each element
    waits for its own messages until the deadline, or until the abort word is set. Missing: 0 if none, else the sender's
    position plus one.
    """
    if INTERPRETED:
        return _poll_interpreted(address, stride, own, epoch, inside, words, SENDERS)
    else:
        return tl.inline_asm_elementwise(
            POLL,
            CONSTRAINTS,
            [address, stride, own, epoch, inside.to(tl.int32), words, timeout_ns],
            dtype=(tl.int32,) * (3 * SENDERS + 1),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _poll_interpreted(address, stride, own, epoch, inside, words, SENDERS):
    """`poll_messages` under the interpreter, without a deadline."""
    missing = tl.zeros_like(inside.to(tl.int32))
    messages = ()
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
            messages += (tl.load(message + index, mask=inside, other=0),)
    messages += (missing,)
    return messages
