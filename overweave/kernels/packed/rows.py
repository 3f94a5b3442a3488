"""Rows of a packed sum on their way to the caller: stored as they are, or with a residual added, and normed.

As kernels/norm.py: `z = sum + residual`, stored, and `z / rms(z) * norm_weight`, each step rounded where torch rounds.
A program has whole rows then, in turns; a row's squares are added over them, and z is read again once they are known.
"""

import triton
import triton.language as tl

from overweave.kernels.packed.parts import load_words, numbers_of, store_words, stretch_of, word_of


@triton.jit
def deliver(out, after, first, sums, left):
    """A turn's sums from word `first` on, `left` words of them; returns the squares of what is normed later, by
    message. after: kernels/arguments.AfterSums; without z nothing is
    normed, without a residual nothing is added."""
    dtype: tl.constexpr = out.dtype.element_ty
    squares = tl.zeros(left.shape, tl.float32)
    if after.z is None:
        store_words(out.to(tl.pointer_type(tl.int32)) + first, sums, left)
    else:
        kept = ()
        for index in tl.static_range(3):
            word = sums[index]
            if after.residual is not None:
                beside = after.residual.to(tl.pointer_type(tl.int32)) + first + index
                added = numbers_of(tl.load(beside, mask=left > index, other=0), dtype)
                numbers = numbers_of(word, dtype)
                word = word_of(numbers[0] + added[0], numbers[1] + added[1], dtype)
            kept += (word,)
            value = numbers_of(word, dtype)
            squares += tl.where(left > index, value[0] * value[0] + value[1] * value[1], 0.0)
        store_words(after.z.to(tl.pointer_type(tl.int32)) + first, kept, left)
    return squares


@triton.jit
def norm_row(traits: tl.constexpr, call, out, after, squares, start, size, turns):
    """The row that a program has of the `size` words from `start` on, if that is one, out of z.

    A block barrier stands before: what is read of z may have been written by another thread.
    """
    dtype = out.dtype.element_ty
    scale = tl.rsqrt(tl.sum(squares, 0) / (call.span * (32 // dtype.primitive_bitwidth)) + traits.eps)
    for turn in range(turns):
        _, first, left = stretch_of(call, turn, traits.block)
        left = tl.minimum(left, size - first)
        row = load_words(after.z.to(tl.pointer_type(tl.int32)) + start + first, left)
        weight = load_words(after.norm_weight.to(tl.pointer_type(tl.int32)) + first - call.part * call.span, left)
        normed = ()
        for index in tl.static_range(3):
            value, factor = numbers_of(row[index], dtype), numbers_of(weight[index], dtype)
            normed += (word_of(value[0] * scale * factor[0], value[1] * scale * factor[1], dtype),)  # type: ignore[assignment]
        store_words(out.to(tl.pointer_type(tl.int32)) + start + first, normed, left)
