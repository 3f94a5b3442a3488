"""Every exchange of packed messages: the flag travels with the data, so there is no head of the call and no signal.

    gather    each program pushes its part of the own shard to all peers, and stores theirs beside its own
    scatter   each program pushes its part of every shard to the shard's owner, and adds its part of the own one
    one_shot  an all-reduce: each program pushes its part of all to all peers, adds theirs and stores the sum
    two_shot  an all-reduce: a scatter whose sums are pushed to all peers at once, then a gather of these

Programs take their part by ticket, in the order in which they arrive, and push before they wait. So the lowest part
that some rank has not pushed is held by nobody that waits for a higher one, and one resident program on each rank makes
progress; of a two-shot, as a program waits for those of the same part only, in its second wait too. All ranks deal
shards alike to programs, by the longest one; who has fewer rows, or none, sends and hears messages of zeros that nobody
stores, so every rank hears from every other in each call.
Every rank adds the same numbers in rank order, in fp32, finishes the sum if there is an epilogue, and rounds once; of
two shots each sum is made once, by its owner: all ranks have the same bits. With a norm, programs have whole
rows, where shards have owners one of each; of a scatter the owner norms its row, of an all-reduce every rank all of
them. What is gathered is moved as it is, whatever its dtype.
SOURCE: one-shot and two-shot all-reduces as in TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.kernels.packed.parts import (
    alarm_if_missing,
    deliver,
    load_words,
    norm_row,
    open_call,
    poll,
    push_to_all,
    store_words,
    stretch_of,
    sums_of,
    told_by,
    words_of,
)
from overweave.memory.device.packed import push_message
from overweave.memory.device.protocol import launch_dependents, wait_for_previous_kernel


@triton.jit
def packed_kernel(source, out, after, space, parts, protocol, rank, n, traits: tl.constexpr):
    """source: the own partial sums, or the own one of the shards that are gathered. out: what the caller gets, rows of
    n numbers: all, or the own shard of a scatter. after: what a norm (rows.py) or the epilogue of sums reads. A
    gather's matmul starts early behind it, any other exchange behind its matmul (memory/device/protocol.py).
    Tuples and traits: kernels/arguments.py.
    """
    SENDERS: tl.constexpr = traits.senders
    if traits.chained and traits.exchange == "gather":
        launch_dependents()
    call = open_call(space, parts, protocol, rank, SENDERS)
    if traits.chained and traits.exchange != "gather":
        wait_for_previous_kernel()
    if traits.exchange == "gather":
        push_shard(traits, call, source, out, parts.turns)
        hear_shards(traits, call, call.here, out, after, parts.turns)
    elif traits.exchange == "one_shot":
        squares = sum_all(traits, call, source, out, after, n, parts.turns)
        if after.z is not None:
            tl.debug_barrier()
            norm_row(traits, call, out, after, squares, 0, call.total, parts.turns)
    elif traits.exchange == "scatter":
        squares = sum_shard(traits, call, source, out, after, n, parts.turns)
        if after.z is not None:
            tl.debug_barrier()
            norm_row(traits, call, out, after, squares, 0, words_of(call, call.rank), parts.turns)
    else:
        squares = sum_shard(traits, call, source, out, after, n, parts.turns)
        behind = call.stride * (SENDERS + 1)
        of_peers = hear_shards(traits, call, call.here + behind, out, after, parts.turns)
        if after.z is not None:
            tl.debug_barrier()
            start = call.rank.to(tl.int64) * call.shard
            norm_row(traits, call, out, after, squares, start, words_of(call, call.rank), parts.turns)
            for sender in tl.static_range(SENDERS):
                owner = tl.where(sender >= call.rank, sender + 1, sender)
                first, size = owner.to(tl.int64) * call.shard, words_of(call, owner)
                norm_row(traits, call, out, after, of_peers[sender], first, size, parts.turns)


@triton.jit
def push_shard(traits: tl.constexpr, call, source, out, turns):
    """The own shard to all peers, and to its place in `out`."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    numbers = source.to(tl.pointer_type(tl.int32))
    target = out.to(tl.pointer_type(tl.int32))
    for turn in range(turns):
        at, first, left = stretch_of(call, turn, BLOCK)
        inside = (left > 0) & (first < call.shard)
        left_here = tl.minimum(left, words_of(call, call.rank) - first)
        own = load_words(numbers + first, left_here)
        push_to_all(call.mine, at, own, call.epoch, inside, SENDERS)
        store_words(target + call.rank.to(tl.int64) * call.shard + first, own, left_here)


@triton.jit
def sum_all(traits: tl.constexpr, call, source, out, after, n, turns):
    """All of the own partial to all peers, and the sums to `out`. Returns what `deliver` does."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    numbers = source.to(tl.pointer_type(tl.int32))
    for turn in range(turns):
        at, first, left = stretch_of(call, turn, BLOCK)
        left = tl.minimum(left, call.total - first)
        push_to_all(call.mine, at, load_words(numbers + first, left), call.epoch, left > 0, SENDERS)
    squares, late = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(call, turn, BLOCK)
        left = tl.minimum(left, call.total - first)
        own = load_words(numbers + first, left)
        # Who waited in vain in one turn does not wait in the next.
        found = poll(traits, call, call.here + at, (left > 0) & (late == 0))
        late = tl.maximum(late, found[3 * SENDERS])
        sums = sums_of(traits, own, found, call.rank, late > 0, after, 0, first, left, n, out.dtype.element_ty)
        squares += deliver(out, after, first, sums, left)
    alarm_if_missing(call, late)
    return squares


@triton.jit
def sum_shard(traits: tl.constexpr, call, source, out, after, n, turns):
    """Every shard of the own partial to its owner; the own shard's sums to `out`, and, of a two-shot, to all peers.
    Returns what `deliver` does.
    """
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    numbers = source.to(tl.pointer_type(tl.int32))
    for turn in range(turns):
        push_parts(traits, call, numbers, turn)
    own_start, own_size = call.rank.to(tl.int64) * call.shard, words_of(call, call.rank)
    start, behind = 0, 0  # of the sums in `out`, and of those among the messages
    if traits.exchange == "two_shot":
        start, behind = own_start, call.stride * (SENDERS + 1)
    squares, late = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(call, turn, BLOCK)
        inside = (left > 0) & (first < call.shard)
        left = tl.minimum(left, own_size - first)
        own = load_words(numbers + own_start + first, left)
        found = poll(traits, call, call.here + at, inside & (late == 0))
        late = tl.maximum(late, found[3 * SENDERS])
        sums = sums_of(traits, own, found, call.rank, late > 0, after, start, first, left, n, out.dtype.element_ty)
        if traits.exchange == "two_shot":
            # A sum that lacks a part is not sent: who waits for it ends by the alarm, and knows that its call is void.
            push_to_all(call.mine, behind + at, sums, call.epoch, inside & (late == 0), SENDERS)
        squares += deliver(out, after, start + first, sums, left)
    alarm_if_missing(call, late)  # of a two-shot before the second wait, which this ends everywhere
    return squares


@triton.jit
def push_parts(traits: tl.constexpr, call, numbers, turn):
    """A turn's messages of every peer's shard to that peer."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    at, first, left = stretch_of(call, turn, BLOCK)
    inside = (left > 0) & (first < call.shard)
    # All loads before the first push, so that they are under way together.
    parts = ()
    for step in tl.static_range(SENDERS):
        owner = (call.rank + step + 1) % (SENDERS + 1)
        left_there = tl.minimum(left, words_of(call, owner) - first)
        parts += load_words(numbers + owner.to(tl.int64) * call.shard + first, left_there)
    for step in tl.static_range(SENDERS):
        push_message(
            call.mine[step] + at, parts[3 * step], parts[3 * step + 1], parts[3 * step + 2], call.epoch, inside
        )


@triton.jit
def hear_shards(traits: tl.constexpr, call, here, out, after, turns):
    """The shards of all peers, as they sent them, to their places in `out`. Returns what `deliver` does, for each."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    squares = ()
    for _ in tl.static_range(SENDERS):
        squares += (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]
    late = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(call, turn, BLOCK)
        found = poll(traits, call, here + at, (left > 0) & (first < call.shard) & (late == 0))
        late = tl.maximum(late, found[3 * SENDERS])
        more, is_void = (), late > 0
        for sender in tl.static_range(SENDERS):
            owner = tl.where(sender >= call.rank, sender + 1, sender)
            left_there = tl.minimum(left, words_of(call, owner) - first)
            told, start = told_by(found, sender, is_void), owner.to(tl.int64) * call.shard
            normed = squares[sender] + deliver(out, after, start + first, told, left_there)
            more += (normed,)  # type: ignore[assignment]
        squares = more
    alarm_if_missing(call, late)
    return squares
