"""Collectives by LL-protocol messages (data and flag in one store): no prologue of the call and no signals.

    gather    each program pushes its part of the own shard to all peers, and stores their parts in the output
    scatter   each program pushes its part of every shard to the shard's owner, and sums its part of the own shard
    one_shot  all-reduce: each program pushes its part of the whole partial to all peers, sums theirs, stores the sum
    two_shot  all-reduce: a scatter whose sums are pushed to all peers at once, then a gather of these

A program takes its part by ticket, in order of arrival, and pushes before it polls. So the lowest part that some rank
has not pushed is never held by a program that waits for a higher one, and one resident program a rank makes progress;
in a two-shot a program polls twice, for messages of its own part only. All ranks divide shards among programs alike, by
the longest shard; a rank with fewer rows, or none, pushes zeros that nobody stores, so that every rank receives from
every other in each call.
Every rank adds the same numbers in rank order, in fp32, applies the epilogue if there is one, and rounds once; in a
two-shot each sum is made once, by its owner: all ranks have the same bits. With RMSNorm, or another row-wise form, a
program has a whole row: of a scatter the owner norms it, of an all-reduce every rank all rows. A gather moves words,
whatever their dtype.
SOURCE: one-shot and two-shot all-reduces as in TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from overweave.kernels.epilogue import (
    Elements,
    combine,
    combine_axis,
    input_count,
    loads_as_words,
    read_input,
    row_statistic,
    step_count,
    step_field,
    step_input,
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

# A program's part is `span` contiguous words of what one rank sends to another: BLOCK messages, or a whole row, which
# takes several iterations of BLOCK messages.


class PackedCall(NamedTuple):
    """A program's view of a call. epoch: of the call. part: this program's, by arrival.

    inbox: address of rank 0's messages to this rank, in the half of this call's epoch; each further rank's are `stride`
    bytes behind. outboxes: address of this rank's messages at each peer, the next rank first. Others: Messages,
    ShardSpans and SignalWords of kernels/arguments.py.
    """

    epoch: Any
    part: Any
    inbox: Any
    outboxes: Any
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
    """Begin a call: take a ticket, and resolve the addresses of messages. Returns a PackedCall."""
    # Triton passes an argument of 1 as a constexpr: added to a tensor it is one.
    rank = tl.zeros([], tl.int32) + rank
    stride = tl.zeros([], tl.int64) + space.stride
    # These loads come before the ticket, so that they are in flight together with it.
    timeout_ns = tl.load(protocol.limits + TIMEOUT_NS)
    inbox = tl.load(space.spaces + rank)
    peers = ()
    for step in tl.static_range(SENDERS):
        peers += (tl.load(space.spaces + (rank + step + 1) % (SENDERS + 1)),)
    epoch, part = take_ticket(space.state, tl.num_programs(0))
    begin = (epoch & 1).to(tl.int64) * space.half
    outboxes = ()
    for step in tl.static_range(SENDERS):
        outboxes += (peers[step] + begin + rank.to(tl.int64) * stride,)
    return PackedCall(
        epoch, part, inbox + begin, outboxes, timeout_ns, rank, stride, parts.total, parts.shard, parts.span,
        protocol.words, protocol.limits, protocol.world_size,
    )  # fmt: skip


@triton.jit
def iteration_messages(call, iteration, BLOCK: tl.constexpr):
    """Return for each message of an iteration: byte offset in an in- or outbox, first word, words left in the part."""
    messages = iteration * BLOCK + tl.arange(0, BLOCK)
    words_before = messages * DATA_WORDS
    offsets = (call.part * ((call.span + 2) // DATA_WORDS) + messages).to(tl.int64) * MESSAGE_BYTES
    return offsets, call.part * call.span + words_before, call.span - words_before


@triton.jit
def shard_words(call, owner):
    """Return the number of words in a rank's shard: `call.shard`, fewer or none for the last ranks."""
    return tl.minimum(call.total - owner.to(tl.int64) * call.shard, call.shard).to(tl.int32)


@triton.jit
def poll(traits: tl.constexpr, call, address, inside):
    """Poll the messages of all peers: three words of each, then the missing sender (`poll_messages`)."""
    POLL: tl.constexpr = traits.poll.text
    CONSTRAINTS: tl.constexpr = traits.poll.constraints
    return poll_messages(
        address,
        call.stride,
        call.rank,
        call.epoch,
        inside,
        call.words,
        call.timeout_ns,
        traits.senders,
        POLL,
        CONSTRAINTS,
    )


@triton.jit
def load_words(data, left):
    """Load the three data words of each message; words from `left` on are 0."""
    return (
        tl.load(data, mask=left > 0, other=0),
        tl.load(data + 1, mask=left > 1, other=0),
        tl.load(data + 2, mask=left > 2, other=0),
    )


@triton.jit
def store_words(target, words, left):
    """Store the three data words of each message, but for words from `left` on."""
    for index in tl.static_range(3):
        tl.store(target + index, words[index], mask=left > index)


@triton.jit
def push_to_all(outboxes, offsets, words, epoch, inside, SENDERS: tl.constexpr):
    """Push the same messages to every peer."""
    for step in tl.static_range(SENDERS):
        push_message(outboxes[step] + offsets, words[0], words[1], words[2], epoch, inside)


@triton.jit
def sum_messages(
    traits: tl.constexpr, own, received, rank, is_void, epilogue_args, start, first, left, n, dtype: tl.constexpr
):
    """Return the three words of each message of the sum over all ranks, finished by the epilogue, rounded once.

    own: this rank's words. received: of `poll`. They are words of the result from `start + first` on, `left` of them; a
    row of n numbers begins at `start`. is_void: the sum becomes NaN. epilogue_args: kernels/arguments.SumEpilogueArgs.
    """
    sums = ()
    for index in tl.static_range(DATA_WORDS):
        low, high = _sum_word(own[index], received, index, rank, is_void, dtype, traits.senders)
        for step in tl.static_range(step_count(traits.epilogue)):
            inputs = _read_word_inputs(
                epilogue_args.inputs, dtype, start, first, None, index, left > index, n, traits.epilogue, step
            )
            low = step_field(traits.epilogue, step, "device")(low, inputs[0])
            if dtype.primitive_bitwidth == 16:
                high = step_field(traits.epilogue, step, "device")(high, inputs[1])
        sums += (pack_word(low, high, dtype),)  # type: ignore[assignment]
    return sums


@triton.jit
def _sum_word(own, received, index: tl.constexpr, rank, is_void, dtype: tl.constexpr, SENDERS: tl.constexpr):
    """Sum one word of all ranks in rank order, in fp32: two 16-bit numbers (low, high), or one of 32. NaN if void."""
    low = tl.zeros(own.shape, tl.float32)
    high = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(SENDERS + 1):
        # received skips the own rank: ranks above it are one position lower.
        from_lower_ranks = received[3 * (source if source < SENDERS else source - 1) + index]
        from_higher_ranks = received[3 * (source - 1 if source > 0 else 0) + index]
        word = tl.where(source == rank, own, tl.where(source < rank, from_lower_ranks, from_higher_ranks))
        values = unpack_word(word, dtype)
        low += values[0]
        high += values[1]
    low = tl.where(is_void, float("nan"), low)
    high = tl.where(is_void, float("nan"), high)
    return low, high


@triton.jit
def message_words(received, sender: tl.constexpr, is_void):
    """Return the three words of each message of one sender; where void all bits set, NaN in any dtype."""
    return (
        tl.where(is_void, -1, received[3 * sender]),
        tl.where(is_void, -1, received[3 * sender + 1]),
        tl.where(is_void, -1, received[3 * sender + 2]),
    )


@triton.jit
def unpack_word(word, dtype: tl.constexpr):
    """Unpack an int32 word to fp32: its two 16-bit numbers, lower first, or (its 32-bit number, 0)."""
    if dtype.primitive_bitwidth == 32:
        return word.to(tl.float32, bitcast=True), tl.zeros(word.shape, tl.float32)
    else:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return low, (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def pack_word(low, high, dtype: tl.constexpr):
    """Pack two fp32 numbers, rounded to 16 bits, or one of 32 bits, as an int32 word."""
    if dtype.primitive_bitwidth == 32:
        return low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        upper = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return upper | lower


@triton.jit
def report_missing(call, missing):
    """Report a timeout of one missing sender, if there is one. missing: of each element, as of `poll_messages`."""
    position_plus_one = tl.max(missing, 0)
    if position_plus_one > 0:
        if claim_report(call.words, call.limits):
            sender = tl.where(position_plus_one - 1 >= call.rank, position_plus_one, position_plus_one - 1)
            write_report(PACKED_OPERATION, sender, call.epoch, 0, call.words, call.limits, call.world_size)


# Row-wise forms, as in kernels/reduction.py: z = sum + residual is stored, and `out` computed from it, rounded where
# torch rounds. A program has a whole row, in several iterations: it accumulates the row's statistic over them, and
# reads z again once the statistic is known.


@triton.jit
def store_or_stage(out, epilogue_args, first, sums, left, combined, ROWS: tl.constexpr):
    """Store an iteration's sums in `out`, from word `first` on, `left` words; or with a row-wise form stage z.

    Returns `combined` with these elements' contributions to the row statistic, by message. epilogue_args:
    SumEpilogueArgs; residual None: z is the sum. ROWS: kernels/epilogue.rows_code.
    """
    if ROWS == 0:
        store_words(out.to(tl.pointer_type(tl.int32)) + first, sums, left)
    else:
        dtype: tl.constexpr = epilogue_args.z.dtype.element_ty
        staged = ()
        for index in tl.static_range(3):
            word = sums[index]
            if epilogue_args.residual is not None:
                inputs = epilogue_args.residual.to(tl.pointer_type(tl.int32)) + first + index
                residual_values = unpack_word(tl.load(inputs, mask=left > index, other=0), dtype)
                values = unpack_word(word, dtype)
                word = pack_word(values[0] + residual_values[0], values[1] + residual_values[1], dtype)
            staged += (word,)  # type: ignore[assignment]
            value = unpack_word(word, dtype)
            low, high = step_field(ROWS, 0, "of_element")(value[0]), step_field(ROWS, 0, "of_element")(value[1])
            combined = combine(combined, tl.where(left > index, combine(low, high, ROWS), 0.0), ROWS)
        store_words(epilogue_args.z.to(tl.pointer_type(tl.int32)) + first, staged, left)
    return combined


@triton.jit
def finish_row(traits: tl.constexpr, call, out, epilogue_args, combined, start, size, iterations):
    """Finish this program's row of z and store it in `out`, if the row is one of the `size` words from `start` on.

    A block barrier must stand before: z is read back by other threads than wrote it.
    """
    ROWS: tl.constexpr = traits.rows
    dtype = epilogue_args.z.dtype.element_ty
    NUMBERS: tl.constexpr = 32 // dtype.primitive_bitwidth
    n, first_word = call.span * NUMBERS, call.part * call.span
    statistic = row_statistic(combine_axis(combined, 0, ROWS), n, ROWS)
    if epilogue_args.row_statistics is not None:
        tl.store(epilogue_args.row_statistics + (start + first_word) // call.span, statistic, mask=first_word < size)
    for iteration in range(iterations):
        _, first, left = iteration_messages(call, iteration, traits.block)
        left = tl.minimum(left, size - first)
        row = load_words(epilogue_args.z.to(tl.pointer_type(tl.int32)) + start + first, left)
        inputs = ()
        for index in tl.static_range(3):
            both = _read_word_inputs(
                epilogue_args.inputs, dtype, start, first, first - first_word, index, left > index, n, ROWS, 0
            )
            inputs += (both,)  # type: ignore[assignment]
        words = ()
        for index in tl.static_range(3):
            value = unpack_word(row[index], dtype)
            low = step_field(ROWS, 0, "device")(value[0], statistic, inputs[index][0])
            high = step_field(ROWS, 0, "device")(value[1], statistic, inputs[index][1])
            if out.dtype.element_ty == dtype:
                words += (pack_word(low, high, dtype),)  # type: ignore[assignment]
            else:  # out has another element size than z: element by element
                target = out + (start + first + index).to(tl.int64) * NUMBERS
                tl.store(target, low.to(out.dtype.element_ty), mask=left > index)
                if NUMBERS == 2:
                    tl.store(target + 1, high.to(out.dtype.element_ty), mask=left > index)
        if out.dtype.element_ty == dtype:
            store_words(out.to(tl.pointer_type(tl.int32)) + start + first, words, left)


@triton.jit
def _read_word_inputs(
    operands, dtype: tl.constexpr, start, word, col_word, index_in_message: tl.constexpr, inside, n, CODE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Return what a step reads for the (low, high) numbers of a word: two tuples.

    start: first word of a row. word, col_word: first word of each message, counted from `start` and from its row; None:
    a row may begin in the middle of a word. index_in_message: which word of the message.
    """
    NUMBERS: tl.constexpr = 32 // dtype.primitive_bitwidth
    SECOND: tl.constexpr = NUMBERS - 1
    word_of_row = word + index_in_message
    element = (start + word_of_row).to(tl.int64) * NUMBERS
    if col_word is None:
        col, next_col = word_of_row * NUMBERS % n, (word_of_row * NUMBERS + SECOND) % n
    else:
        col, next_col = (col_word + index_in_message) * NUMBERS, (col_word + index_in_message) * NUMBERS + SECOND
    low, high = (), ()
    for index in tl.static_range(input_count(CODE, STEP)):
        if loads_as_words(operands, dtype, CODE, STEP, index, col_word is None):
            address = operands[step_input(CODE, STEP, index, 1)].to(tl.pointer_type(tl.int32))
            if step_input(CODE, STEP, index, 0) == "yn":
                address = address + start + word_of_row
            else:
                address = address + col_word + index_in_message
            values = unpack_word(tl.load(address, mask=inside, other=0), dtype)
            low += (values[0],)  # type: ignore[assignment]
            high += (values[1],)  # type: ignore[assignment]
        else:
            low += (  # type: ignore[assignment]
                read_input(operands, None, Elements(element, inside, col, n, 0, 0, None), CODE, STEP, index),
            )
            high += (  # type: ignore[assignment]
                read_input(
                    operands, None, Elements(element + SECOND, inside, next_col, n, 0, 0, None), CODE, STEP, index
                ),
            )
    return low, high


@triton.jit
def packed_kernel(source, out, epilogue_args, space, parts, protocol, rank, n, traits: tl.constexpr):
    """Run the collective that `traits.exchange` names.

    source: this rank's partial sums, or its shard to gather. out: the caller's tensor, rows of n numbers: all, or the
    own shard of a scatter. A gather lets the next kernel, its matmul, start early; any other starts early itself, and
    waits for its matmul (memory/device/protocol.py). Tuples and traits: kernels/arguments.py.
    """
    SENDERS: tl.constexpr = traits.senders
    if traits.chained and traits.exchange == "gather":
        launch_dependents()
    call = open_call(space, parts, protocol, rank, SENDERS)
    if traits.chained and traits.exchange != "gather":
        wait_for_previous_kernel()
    if traits.exchange == "gather":
        push_own_shard(traits, call, source, out, parts.iterations)
        receive_shards(traits, call, call.inbox, out, epilogue_args, parts.iterations)
    elif traits.exchange == "one_shot":
        combined = one_shot_sum(traits, call, source, out, epilogue_args, n, parts.iterations)
        if traits.rows:
            tl.debug_barrier()
            finish_row(traits, call, out, epilogue_args, combined, 0, call.total, parts.iterations)
    elif traits.exchange == "scatter":
        combined = scatter_sum(traits, call, source, out, epilogue_args, n, parts.iterations)
        if traits.rows:
            tl.debug_barrier()
            finish_row(traits, call, out, epilogue_args, combined, 0, shard_words(call, call.rank), parts.iterations)
    else:
        combined = scatter_sum(traits, call, source, out, epilogue_args, n, parts.iterations)
        sums_offset = call.stride * (SENDERS + 1)
        of_peers = receive_shards(traits, call, call.inbox + sums_offset, out, epilogue_args, parts.iterations)
        if traits.rows:
            tl.debug_barrier()
            start = call.rank.to(tl.int64) * call.shard
            finish_row(
                traits, call, out, epilogue_args, combined, start, shard_words(call, call.rank), parts.iterations
            )
            for sender in tl.static_range(SENDERS):
                owner = tl.where(sender >= call.rank, sender + 1, sender)
                first, size = owner.to(tl.int64) * call.shard, shard_words(call, owner)
                finish_row(traits, call, out, epilogue_args, of_peers[sender], first, size, parts.iterations)


@triton.jit
def push_own_shard(traits: tl.constexpr, call, source, out, iterations):
    """Push the own shard to all peers, and store it in its place in `out`."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    source_words = source.to(tl.pointer_type(tl.int32))
    target = out.to(tl.pointer_type(tl.int32))
    for iteration in range(iterations):
        offsets, first, left = iteration_messages(call, iteration, BLOCK)
        inside = (left > 0) & (first < call.shard)
        left_here = tl.minimum(left, shard_words(call, call.rank) - first)
        own = load_words(source_words + first, left_here)
        push_to_all(call.outboxes, offsets, own, call.epoch, inside, SENDERS)
        store_words(target + call.rank.to(tl.int64) * call.shard + first, own, left_here)


@triton.jit
def one_shot_sum(traits: tl.constexpr, call, source, out, epilogue_args, n, iterations):
    """One-shot: push the own partial to all peers, sum all ranks' in `out`. Returns the combined row statistic."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    source_words = source.to(tl.pointer_type(tl.int32))
    for iteration in range(iterations):
        offsets, first, left = iteration_messages(call, iteration, BLOCK)
        left = tl.minimum(left, call.total - first)
        push_to_all(call.outboxes, offsets, load_words(source_words + first, left), call.epoch, left > 0, SENDERS)
    combined, missing = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for iteration in range(iterations):
        offsets, first, left = iteration_messages(call, iteration, BLOCK)
        left = tl.minimum(left, call.total - first)
        own = load_words(source_words + first, left)
        # An element that timed out once does not wait again.
        received = poll(traits, call, call.inbox + offsets, (left > 0) & (missing == 0))
        missing = tl.maximum(missing, received[3 * SENDERS])
        sums = sum_messages(
            traits, own, received, call.rank, missing > 0, epilogue_args, 0, first, left, n, source.dtype.element_ty
        )
        combined = store_or_stage(out, epilogue_args, first, sums, left, combined, traits.rows)
    report_missing(call, missing)
    return combined


@triton.jit
def scatter_sum(traits: tl.constexpr, call, source, out, epilogue_args, n, iterations):
    """Push every shard of the own partial to its owner; sum the own shard in `out`; in a two-shot push the sum to all.

    Returns the combined row statistic.
    """
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    source_words = source.to(tl.pointer_type(tl.int32))
    for iteration in range(iterations):
        push_shard_partials(traits, call, source_words, iteration)
    own_start, own_size = call.rank.to(tl.int64) * call.shard, shard_words(call, call.rank)
    start, sums_offset = 0, 0  # first word of the own sums in `out`; byte offset of sums in an outbox
    if traits.exchange == "two_shot":
        start, sums_offset = own_start, call.stride * (SENDERS + 1)
    combined, missing = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for iteration in range(iterations):
        offsets, first, left = iteration_messages(call, iteration, BLOCK)
        inside = (left > 0) & (first < call.shard)
        left = tl.minimum(left, own_size - first)
        own = load_words(source_words + own_start + first, left)
        received = poll(traits, call, call.inbox + offsets, inside & (missing == 0))
        missing = tl.maximum(missing, received[3 * SENDERS])
        sums = sum_messages(
            traits, own, received, call.rank, missing > 0, epilogue_args, start, first, left, n, source.dtype.element_ty
        )
        if traits.exchange == "two_shot":
            # An incomplete sum is not pushed: its readers end by the abort word, and their call is void.
            push_to_all(call.outboxes, sums_offset + offsets, sums, call.epoch, inside & (missing == 0), SENDERS)
        combined = store_or_stage(out, epilogue_args, start + first, sums, left, combined, traits.rows)
    report_missing(call, missing)  # in a two-shot before the second poll, which the abort word ends on all ranks
    return combined


@triton.jit
def push_shard_partials(traits: tl.constexpr, call, source_words, iteration):
    """Push one iteration's messages of every peer's shard to that peer."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    offsets, first, left = iteration_messages(call, iteration, BLOCK)
    inside = (left > 0) & (first < call.shard)
    # All loads before the first push, so that they are in flight together.
    parts = ()
    for step in tl.static_range(SENDERS):
        owner = (call.rank + step + 1) % (SENDERS + 1)
        left_there = tl.minimum(left, shard_words(call, owner) - first)
        parts += load_words(source_words + owner.to(tl.int64) * call.shard + first, left_there)
    for step in tl.static_range(SENDERS):
        push_message(
            call.outboxes[step] + offsets, parts[3 * step], parts[3 * step + 1], parts[3 * step + 2], call.epoch, inside
        )


@triton.jit
def receive_shards(traits: tl.constexpr, call, inbox, out, epilogue_args, iterations):
    """Receive the shards of all peers into their places in `out`. Returns a combined row statistic of each."""
    SENDERS: tl.constexpr = traits.senders
    BLOCK: tl.constexpr = traits.block
    combined = ()
    for _ in tl.static_range(SENDERS):
        combined += (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]
    missing = tl.zeros([BLOCK], tl.int32)
    for iteration in range(iterations):
        offsets, first, left = iteration_messages(call, iteration, BLOCK)
        received = poll(traits, call, inbox + offsets, (left > 0) & (first < call.shard) & (missing == 0))
        missing = tl.maximum(missing, received[3 * SENDERS])
        more, is_void = (), missing > 0
        for sender in tl.static_range(SENDERS):
            owner = tl.where(sender >= call.rank, sender + 1, sender)
            left_there = tl.minimum(left, shard_words(call, owner) - first)
            words_received, start = message_words(received, sender, is_void), owner.to(tl.int64) * call.shard
            joined = store_or_stage(
                out, epilogue_args, start + first, words_received, left_there, combined[sender], traits.rows
            )
            more += (joined,)  # type: ignore[assignment]
        combined = more
    report_missing(call, missing)
    return combined
