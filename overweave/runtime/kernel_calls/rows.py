"""The launches that send rows, put them in place, and add what comes back (kernels/rows.py), as steps of a program."""

from __future__ import annotations

import torch

from overweave.kernels.arguments import RowSizes
from overweave.kernels.rows import add_rows_kernel, land_rows_kernel, push_rows_kernel
from overweave.runtime.handwritten import ChannelArgument, TensorArgument, TileLaunch
from overweave.runtime.library.rows import Parts, Placed, Sending, SendSizes

STEP_ROWS, STEP_WORDS = 8, 1024  # what a program has under way: 32 KiB
WORD_BYTES = 4
BULK_BYTES = 2048  # rows from which bulk copies send them
PUSH_WARPS, LAND_WARPS, ADD_WARPS = 16, 8, 4
# Programs that wait for peers beside those that push: they never fill a GPU.
LANDING, ADDING = 64, 256
ADDED_AT_ONCE = 1024  # columns
COUNTED, ARRIVED = ChannelArgument("counted"), ChannelArgument("arrived")
COUNTS, LANDED, BESIDE = TensorArgument("counts"), TensorArgument("landed"), TensorArgument("beside")


def _of_kernel(sizes: SendSizes, tells: bool) -> RowSizes:
    step = min(STEP_WORDS, 1 << (max(sizes.words, 1) - 1).bit_length())
    bulk = WORD_BYTES * sizes.words >= BULK_BYTES
    return RowSizes(*sizes[:4], STEP_ROWS, step, bulk, tells)


def push_launch(sizes: SendSizes, sending: Sending) -> TileLaunch:
    """Return the launch that sends rows to all peers."""
    source, counts = sending
    tells = (COUNTED, ARRIVED, COUNTS) if counts is not None else (None, ARRIVED, None)
    beside = BESIDE if sizes.beside else None
    of_rank = (source, counts, source.rows.shape[0], source.starts.shape[0] - 2)
    arguments = (*tells, LANDED, beside, *of_rank, _of_kernel(sizes, counts is not None))
    return TileLaunch(push_rows_kernel, (sizes.programs,), arguments, {"num_warps": PUSH_WARPS})


def land_launch(sizes: SendSizes, sending: Sending, placed: Placed) -> TileLaunch:
    """Return the launch that puts received rows together."""
    beside = BESIDE if sizes.beside else None
    source, counts = sending
    arguments = (COUNTED, ARRIVED, COUNTS, LANDED, beside, source, counts, source.rows.shape[0], *placed)
    of_kernel = _of_kernel(sizes, True)
    steps = -(-sizes.most // of_kernel.step_rows) * -(-sizes.words // of_kernel.step_words)
    programs = max(1, min(LANDING, steps))
    return TileLaunch(land_rows_kernel, (programs,), (*arguments, of_kernel), {"num_warps": LAND_WARPS})


def add_launch(sizes: SendSizes, own: Parts, y: torch.Tensor) -> TileLaunch:
    """Return the launch that adds the parts of each token."""
    tokens, width = y.shape
    block = min(ADDED_AT_ONCE, 1 << (max(width, 1) - 1).bit_length())
    arguments = (ARRIVED, LANDED, *own, y, tokens, _of_kernel(sizes, False), width, block)
    return TileLaunch(add_rows_kernel, (max(1, min(tokens, ADDING)),), arguments, {"num_warps": ADD_WARPS})
