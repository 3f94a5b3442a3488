"""Rows of a packed sum on their way to the caller: stored as they are, or with a residual added, and finished.

As kernels/norm.py: `z = sum + residual`, stored, and out of it the elements, each step rounded where torch rounds.
A program has whole rows then, in turns; what a row's elements count for is joined over them, and z is read again once
the row's number is known.
"""

import triton
import triton.language as tl

from overweave.kernels.added import (
    how_many_read,
    is_by_words,
    join,
    join_along,
    number_of_row,
    of_step,
    read_added,
    read_of,
)
from overweave.kernels.packed.parts import load_words, numbers_of, store_words, stretch_of, word_of


@triton.jit
def deliver(out, after, first, sums, left, counted, ROWS: tl.constexpr):
    """A turn's sums from word `first` on, `left` words of them; returns what elements of rows that are finished later
    count for, by message, joined with `counted`, that of other turns. after: kernels/arguments.AfterSums; without a
    residual nothing is added. ROWS: kernels/added.rows_code."""
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
            both = _beside(after.more, dtype, start + first, first - begin, index, left > index, n, ROWS)
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
def _beside(operands, dtype: tl.constexpr, word, col_word, at: tl.constexpr, inside, n, ROWS: tl.constexpr):
    """What both numbers of words are stored beside. word, col_word: where messages begin, in the result and in their
    row; at: which of a message's words."""
    NUMBERS: tl.constexpr = 32 // dtype.primitive_bitwidth
    place, col = (word + at).to(tl.int64) * NUMBERS, (col_word + at) * NUMBERS
    low, high = (), ()
    for index in tl.static_range(how_many_read(ROWS, 0)):
        if is_by_words(operands, dtype, read_of(ROWS, 0, index, 0), read_of(ROWS, 0, index, 1)):
            address = operands[read_of(ROWS, 0, index, 1)].to(tl.pointer_type(tl.int32)) + col_word + at
            both = numbers_of(tl.load(address, mask=inside, other=0), dtype)
            low += (both[0],)  # type: ignore[assignment]
            high += (both[1],)  # type: ignore[assignment]
        else:
            further = NUMBERS - 1
            low += (read_added(operands, place, inside, col, n, ROWS, 0, index),)  # type: ignore[assignment]
            high += (read_added(operands, place + further, inside, col + further, n, ROWS, 0, index),)  # type: ignore[assignment]
    return low, high
