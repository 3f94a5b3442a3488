"""The launches that send rows, put them in place, and add what comes back (kernels/rows.py), as steps of a program."""

from __future__ import annotations

import torch

from overweave.kernels.arguments import RowBounds, RowSizes
from overweave.kernels.rows import add_rows_kernel, land_rows_kernel, push_rows_kernel
from overweave.runtime.handwritten import ChannelArgument, TensorArgument, TileLaunch
from overweave.runtime.sent_rows import Parts, Placed, Sending, SendSizes

# MEASURED: two H200s, 2026-11-29, a rank sends 4,096 rows of 14 KiB on 12 SMs: bulk copies of rows one by one took
# about 284 us, of a whole stretch about 165, which is the link. So chosen rows go by loads and stores.
STEP_WORDS, ROWS_OF_WARPS = 1024, 2  # what a program has under way: 4 KiB of a row for two warps
PUSH_WARPS, LAND_WARPS, ADD_WARPS = 16, 8, 4
# Programs that wait for peers beside those that push: they never fill a GPU.
LANDING, ADDING = 64, 256
ADDED_AT_ONCE = 1024  # columns
COUNTED, ARRIVED = ChannelArgument("counted"), ChannelArgument("arrived")
COUNTS, LANDED, BESIDE = TensorArgument("counts"), TensorArgument("landed"), TensorArgument("beside")


def _of_kernel(sizes: SendSizes, warps: int, tells: bool = True) -> RowSizes:
    step = min(STEP_WORDS, 1 << (max(sizes.words, 1) - 1).bit_length())
    return RowSizes(sizes.words, sizes.beside, warps // ROWS_OF_WARPS, step, tells)


def _bounds(sizes: SendSizes, sending: Sending) -> RowBounds:
    source = sending.source
    return RowBounds(sizes.shard, sizes.most, source.rows.shape[0], source.starts.shape[0] - 2)


def push_launch(sizes: SendSizes, sending: Sending) -> TileLaunch:
    """Return the launch that sends rows to all peers."""
    source, counts = sending
    tells = (COUNTED, ARRIVED, COUNTS) if counts is not None else (None, ARRIVED, None)
    of_rank = (source, counts, _bounds(sizes, sending), _of_kernel(sizes, PUSH_WARPS, counts is not None))
    arguments = (*tells, LANDED, BESIDE if sizes.beside else None, *of_rank)
    return TileLaunch(push_rows_kernel, (sizes.programs,), arguments, {"num_warps": PUSH_WARPS})


def land_launch(sizes: SendSizes, sending: Sending, placed: Placed) -> TileLaunch:
    """Return the launch that puts received rows together."""
    of_kernel = _of_kernel(sizes, LAND_WARPS)
    steps = -(-sizes.most // of_kernel.step_rows) * -(-sizes.words // of_kernel.step_words)
    landed = (LANDED, BESIDE if sizes.beside else None)
    arguments = (COUNTED, ARRIVED, COUNTS, *landed, *sending, _bounds(sizes, sending), *placed, of_kernel)
    return TileLaunch(land_rows_kernel, (max(1, min(LANDING, steps)),), arguments, {"num_warps": LAND_WARPS})


def add_launch(sizes: SendSizes, sending: Sending, own: Parts, y: torch.Tensor) -> TileLaunch:
    """Return the launch that adds the parts of each token."""
    tokens, width = y.shape
    block = min(ADDED_AT_ONCE, 1 << (max(width, 1) - 1).bit_length())
    arguments = (ARRIVED, LANDED, *own, y, tokens, _bounds(sizes, sending), width, block)
    return TileLaunch(add_rows_kernel, (max(1, min(tokens, ADDING)),), arguments, {"num_warps": ADD_WARPS})
