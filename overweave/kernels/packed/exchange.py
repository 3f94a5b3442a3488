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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from overweave.kernels.epilogue import (
    Elements,
    how_many_read,
    how_many_steps,
    is_by_words,
    join,
    join_along,
    number_of_row,
    of_step,
    read_input,
    read_of,
)
from overweave.memory.device.packed import (
    DATA_WORDS,
    MESSAGE_BYTES,
    PACKED_OPERATION,
    poll_messages,
    push_message,
    take_ticket,
)
from overweave.memory.device.protocol import launch_dependents, wait_for_previous_kernel
from overweave.memory.device.signals import TIMEOUT_NS, claim_report, write_report

# A program's part is a stretch of `span` words of what a rank sends to another: as many messages as it has under way at
# a time, or a whole row, which takes it several turns of BLOCK messages each. All ranks deal stretches alike to
# programs.


class PackedCall(NamedTuple):
    """A program's view of a call. part: of this program, in the order of arrival. here: where what rank 0 sends to this
    rank lies in this call's half; of each further rank, `stride` bytes behind it. mine: where this rank's own lies at
    each peer, the next rank first. The rest: as of kernels/arguments.py.
    """

    epoch: Any
    part: Any
    here: Any
    mine: Any
    timeout_ns: Any
    rank: Any
    stride: Any
    total: Any
    shard: Any
    span: Any
    words: Any
    limits: Any
    world_size: Any


@triton.jit
def open_call(space, parts, protocol, rank, SENDERS):
    """How a packed kernel begins: takes its part."""
    # Added to a tensor: a number of one arrives as a plain number.
    rank = tl.zeros([], tl.int32) + rank
    stride = tl.zeros([], tl.int64) + space.stride
    # What no ticket is needed for comes first: its loads are under way together with the ticket.
    timeout_ns = tl.load(protocol.limits + TIMEOUT_NS)
    here = tl.load(space.spaces + rank)
    peers = ()
    for step in tl.static_range(SENDERS):
        peers += (tl.load(space.spaces + (rank + step + 1) % (SENDERS + 1)),)
    epoch, part = take_ticket(space.state, tl.num_programs(0))
    begin = (epoch & 1).to(tl.int64) * space.half
    mine = ()
    for step in tl.static_range(SENDERS):
        mine += (peers[step] + begin + rank.to(tl.int64) * stride,)
    return PackedCall(
        epoch, part, here + begin, mine, timeout_ns, rank, stride, parts.total, parts.shard, parts.span,
        protocol.words, protocol.limits, protocol.world_size,
    )  # fmt: skip


@triton.jit
def stretch_of(call, turn, BLOCK: tl.constexpr):
    """The messages of a program's turn: (where each lies, its first word, how many words of the stretch are left)."""
    messages = turn * BLOCK + tl.arange(0, BLOCK)
    within = messages * DATA_WORDS
    at = (call.part * ((call.span + 2) // DATA_WORDS) + messages).to(tl.int64) * MESSAGE_BYTES
    return at, call.part * call.span + within, call.span - within


@triton.jit
def words_of(call, owner):
    """How many words an owner has of all, dealt in shards; none or fewer where it has no rows."""
    return tl.minimum(call.total - owner.to(tl.int64) * call.shard, call.shard).to(tl.int32)


@triton.jit
def poll(traits: tl.constexpr, call, address, inside):
    """The messages of all peers, as `poll_messages` finds them."""
    POLL: tl.constexpr = traits.poll.text
    HELD: tl.constexpr = traits.poll.constraints
    return poll_messages(
        address, call.stride, call.rank, call.epoch, inside, call.words, call.timeout_ns, traits.senders, POLL, HELD
    )


@triton.jit
def load_words(data, left):
    """The words of each message: up to three of those that are left."""
    return (
        tl.load(data, mask=left > 0, other=0),
        tl.load(data + 1, mask=left > 1, other=0),
        tl.load(data + 2, mask=left > 2, other=0),
    )


@triton.jit
def store_words(target, words, left):
    """Stores the words of each message, up to three of those that are left."""
    for index in tl.static_range(3):
        tl.store(target + index, words[index], mask=left > index)


@triton.jit
def push_to_all(mine, at, words, epoch, inside, SENDERS: tl.constexpr):
    """The same messages to every peer."""
    for step in tl.static_range(SENDERS):
        push_message(mine[step] + at, words[0], words[1], words[2], epoch, inside)


@triton.jit
def sums_of(traits: tl.constexpr, own, found, rank, is_void, after, start, first, left, n, dtype: tl.constexpr):
    """The words of each message of the sum of all ranks, finished by the epilogue (kernels/epilogue.py), rounded once.

    They are words of the result from `start + first` on, `left` of them; at `start` a row of n numbers begins.
    after: kernels/arguments.AfterSums.
    """
    sums = ()
    for index in tl.static_range(DATA_WORDS):
        low, high = _added(own[index], found, index, rank, is_void, dtype, traits.senders)
        for step in tl.static_range(how_many_steps(traits.epilogue)):
            beside = _beside(after.inputs, dtype, start, first, None, index, left > index, n, traits.epilogue, step)
            low = of_step(traits.epilogue, step, "device")(low, beside[0])
            if dtype.primitive_bitwidth == 16:
                high = of_step(traits.epilogue, step, "device")(high, beside[1])
        sums += (word_of(low, high, dtype),)  # type: ignore[assignment]
    return sums


@triton.jit
def _added(own, found, index: tl.constexpr, rank, is_void, dtype: tl.constexpr, SENDERS: tl.constexpr):
    """The sum of one word of all ranks, in rank order: two numbers of 16 bits, or one of 32. NaN where it is void."""
    low = tl.zeros(own.shape, tl.float32)
    high = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(SENDERS + 1):
        # Senders leave no gap where the own rank stands.
        behind = found[3 * (source if source < SENDERS else source - 1) + index]
        before = found[3 * (source - 1 if source > 0 else 0) + index]
        word = tl.where(source == rank, own, tl.where(source < rank, behind, before))
        numbers = numbers_of(word, dtype)
        low += numbers[0]
        high += numbers[1]
    low = tl.where(is_void, float("nan"), low)
    high = tl.where(is_void, float("nan"), high)
    return low, high


@triton.jit
def told_by(found, sender: tl.constexpr, is_void):
    """The words of each message of a sender as they came; where they are void, all bits, which is NaN in any dtype."""
    return (
        tl.where(is_void, -1, found[3 * sender]),
        tl.where(is_void, -1, found[3 * sender + 1]),
        tl.where(is_void, -1, found[3 * sender + 2]),
    )


@triton.jit
def numbers_of(word, dtype: tl.constexpr):
    """The two numbers of 16 bits in a word, the lower first, or the one of 32, and nought beside it."""
    if dtype.primitive_bitwidth == 32:
        return word.to(tl.float32, bitcast=True), tl.zeros(word.shape, tl.float32)
    else:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return low, (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def word_of(low, high, dtype: tl.constexpr):
    """Two numbers rounded to 16 bits, or one of 32, as a word."""
    if dtype.primitive_bitwidth == 32:
        return low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        upper = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return upper | lower


@triton.jit
def alarm_if_missing(call, missing):
    """Reports the peer whose message some element of `missing` did not get, if there is one."""
    late = tl.max(missing, 0)
    if late > 0:
        if claim_report(call.words, call.limits):
            sender = tl.where(late - 1 >= call.rank, late, late - 1)
            write_report(PACKED_OPERATION, sender, call.epoch, 0, call.words, call.limits, call.world_size)


# As kernels/reduction.py: `z = sum + residual`, stored, and out of it the elements, each step rounded where torch
# rounds. A program has whole rows then, in turns; what a row's elements count for is joined over them, and z is read
# again once the row's number is known.


@triton.jit
def deliver(out, after, first, sums, left, counted, ROWS: tl.constexpr):
    """A turn's sums from word `first` on, `left` words of them; returns what elements of rows that are finished later
    count for, by message, joined with `counted`, that of other turns. after: kernels/arguments.AfterSums; without a
    residual nothing is added. ROWS: kernels/epilogue.rows_code."""
    if ROWS == 0:
        store_words(out.to(tl.pointer_type(tl.int32)) + first, sums, left)
    else:
        dtype: tl.constexpr = after.z.dtype.element_ty
        kept = ()
        for index in tl.static_range(3):
            word = sums[index]
            if after.residual is not None:
                beside = after.residual.to(tl.pointer_type(tl.int32)) + first + index
                added = numbers_of(tl.load(beside, mask=left > index, other=0), dtype)
                numbers = numbers_of(word, dtype)
                word = word_of(numbers[0] + added[0], numbers[1] + added[1], dtype)
            kept += (word,)  # type: ignore[assignment]
            value = numbers_of(word, dtype)
            low, high = of_step(ROWS, 0, "of_element")(value[0]), of_step(ROWS, 0, "of_element")(value[1])
            counted = join(counted, tl.where(left > index, join(low, high, ROWS), 0.0), ROWS)
        store_words(after.z.to(tl.pointer_type(tl.int32)) + first, kept, left)
    return counted


@triton.jit
def finish_row(traits: tl.constexpr, call, out, after, counted, start, size, turns):
    """The row that a program has of the `size` words from `start` on, if that is one, out of z.

    A block barrier stands before: what is read of z may have been written by another thread.
    """
    ROWS: tl.constexpr = traits.rows
    dtype = after.z.dtype.element_ty
    NUMBERS: tl.constexpr = 32 // dtype.primitive_bitwidth
    n, begin = call.span * NUMBERS, call.part * call.span
    number = number_of_row(join_along(counted, 0, ROWS), n, ROWS)
    if after.numbers is not None:
        tl.store(after.numbers + (start + begin) // call.span, number, mask=begin < size)
    for turn in range(turns):
        _, first, left = stretch_of(call, turn, traits.block)
        left = tl.minimum(left, size - first)
        row = load_words(after.z.to(tl.pointer_type(tl.int32)) + start + first, left)
        beside = ()
        for index in tl.static_range(3):
            both = _beside(after.inputs, dtype, start, first, first - begin, index, left > index, n, ROWS, 0)
            beside += (both,)  # type: ignore[assignment]
        words = ()
        for index in tl.static_range(3):
            value = numbers_of(row[index], dtype)
            low = of_step(ROWS, 0, "device")(value[0], number, beside[index][0])
            high = of_step(ROWS, 0, "device")(value[1], number, beside[index][1])
            if out.dtype.element_ty == dtype:
                words += (word_of(low, high, dtype),)  # type: ignore[assignment]
            else:  # elements of another size, one by one
                place = out + (start + first + index).to(tl.int64) * NUMBERS
                tl.store(place, low.to(out.dtype.element_ty), mask=left > index)
                if NUMBERS == 2:
                    tl.store(place + 1, high.to(out.dtype.element_ty), mask=left > index)
        if out.dtype.element_ty == dtype:
            store_words(out.to(tl.pointer_type(tl.int32)) + start + first, words, left)


@triton.jit
def _beside(
    operands, dtype: tl.constexpr, start, word, col_word, at: tl.constexpr, inside, n, CODE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """What a step reads for both numbers of words. start: a row's. word, col_word: where messages begin behind it, and
    in their row; None: a row may begin with the second number of a word. at: which of a message's words.
    """
    NUMBERS: tl.constexpr = 32 // dtype.primitive_bitwidth
    further: tl.constexpr = NUMBERS - 1
    own = word + at
    place = (start + own).to(tl.int64) * NUMBERS
    if col_word is None:
        col, next_col = own * NUMBERS % n, (own * NUMBERS + further) % n
    else:
        col, next_col = (col_word + at) * NUMBERS, (col_word + at) * NUMBERS + further
    low, high = (), ()
    for index in tl.static_range(how_many_read(CODE, STEP)):
        if is_by_words(operands, dtype, CODE, STEP, index, col_word is None):
            address = operands[read_of(CODE, STEP, index, 1)].to(tl.pointer_type(tl.int32))
            if read_of(CODE, STEP, index, 0) == "yn":
                address = address + start + own
            else:
                address = address + col_word + at
            both = numbers_of(tl.load(address, mask=inside, other=0), dtype)
            low += (both[0],)  # type: ignore[assignment]
            high += (both[1],)  # type: ignore[assignment]
        else:
            low += (  # type: ignore[assignment]
                read_input(operands, None, Elements(place, inside, col, n, 0, 0, None), CODE, STEP, index),
            )
            high += (  # type: ignore[assignment]
                read_input(
                    operands, None, Elements(place + further, inside, next_col, n, 0, 0, None), CODE, STEP, index
                ),
            )
    return low, high


@triton.jit
def packed_kernel(source, out, after, space, parts, protocol, rank, n, traits: tl.constexpr):
    """source: the own partial sums, or the own one of the shards that are gathered. out: what the caller gets, rows of
    n numbers: all, or the own shard of a scatter. after: what a norm or the epilogue of sums reads. A
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
        counted = sum_all(traits, call, source, out, after, n, parts.turns)
        if traits.rows:
            tl.debug_barrier()
            finish_row(traits, call, out, after, counted, 0, call.total, parts.turns)
    elif traits.exchange == "scatter":
        counted = sum_shard(traits, call, source, out, after, n, parts.turns)
        if traits.rows:
            tl.debug_barrier()
            finish_row(traits, call, out, after, counted, 0, words_of(call, call.rank), parts.turns)
    else:
        counted = sum_shard(traits, call, source, out, after, n, parts.turns)
        behind = call.stride * (SENDERS + 1)
        of_peers = hear_shards(traits, call, call.here + behind, out, after, parts.turns)
        if traits.rows:
            tl.debug_barrier()
            start = call.rank.to(tl.int64) * call.shard
            finish_row(traits, call, out, after, counted, start, words_of(call, call.rank), parts.turns)
            for sender in tl.static_range(SENDERS):
                owner = tl.where(sender >= call.rank, sender + 1, sender)
                first, size = owner.to(tl.int64) * call.shard, words_of(call, owner)
                finish_row(traits, call, out, after, of_peers[sender], first, size, parts.turns)


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
    counted, late = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(call, turn, BLOCK)
        left = tl.minimum(left, call.total - first)
        own = load_words(numbers + first, left)
        # Who waited in vain in one turn does not wait in the next.
        found = poll(traits, call, call.here + at, (left > 0) & (late == 0))
        late = tl.maximum(late, found[3 * SENDERS])
        sums = sums_of(traits, own, found, call.rank, late > 0, after, 0, first, left, n, source.dtype.element_ty)
        counted = deliver(out, after, first, sums, left, counted, traits.rows)
    alarm_if_missing(call, late)
    return counted


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
    counted, late = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(call, turn, BLOCK)
        inside = (left > 0) & (first < call.shard)
        left = tl.minimum(left, own_size - first)
        own = load_words(numbers + own_start + first, left)
        found = poll(traits, call, call.here + at, inside & (late == 0))
        late = tl.maximum(late, found[3 * SENDERS])
        sums = sums_of(traits, own, found, call.rank, late > 0, after, start, first, left, n, source.dtype.element_ty)
        if traits.exchange == "two_shot":
            # A sum that lacks a part is not sent: who waits for it ends by the alarm, and knows that its call is void.
            push_to_all(call.mine, behind + at, sums, call.epoch, inside & (late == 0), SENDERS)
        counted = deliver(out, after, start + first, sums, left, counted, traits.rows)
    alarm_if_missing(call, late)  # of a two-shot before the second wait, which this ends everywhere
    return counted


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
    counted = ()
    for _ in tl.static_range(SENDERS):
        counted += (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]
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
            joined = deliver(out, after, start + first, told, left_there, counted[sender], traits.rows)
            more += (joined,)  # type: ignore[assignment]
        counted = more
    alarm_if_missing(call, late)
    return counted
