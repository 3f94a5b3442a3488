"""The launches of expert-parallel dispatch and combine (kernels/rows.py): push, land, add; as steps of a program."""

from __future__ import annotations

import torch

from overweave.kernels.arguments import RowBounds, RowSizes
from overweave.kernels.rows import add_rows_kernel, land_rows_kernel, push_rows_kernel
from overweave.runtime.handwritten import ChannelArgument, TensorArgument, TileLaunch
from overweave.runtime.sent_rows import Parts, Placed, Sending, SendSizes

# MEASURED: two H200s, 2026-11-29, a rank sends 4,096 rows of 14 KiB on 12 SMs: bulk copies of rows one by one took
# about 284 us, of a whole stretch about 165, which is the link. So chosen rows go by loads and stores.
STEP_WORDS, ROWS_OF_WARPS = 1024, 2  # in flight by a program: 4 KiB of a row for every two warps
PUSH_WARPS, LAND_WARPS, ADD_WARPS = 16, 8, 4
# Programs that wait for peers: together with those that push they never fill a GPU.
LAND_PROGRAMS, ADD_PROGRAMS = 64, 256
ADD_COLUMNS = 1024  # columns
COUNTS_CHANNEL, ROWS_CHANNEL = ChannelArgument("counts"), ChannelArgument("arrived")
COUNTS, STAGING, META_STAGING = TensorArgument("counts"), TensorArgument("landed"), TensorArgument("metadata")


def _row_sizes(sizes: SendSizes, warps: int, pushes_counts: bool = True) -> RowSizes:
    """Return the compile-time sizes for a kernel of so many warps."""
    step = min(STEP_WORDS, 1 << (max(sizes.words, 1) - 1).bit_length())
    return RowSizes(sizes.words, sizes.metadata, warps // ROWS_OF_WARPS, step, pushes_counts)


def _bounds(sizes: SendSizes, sending: Sending) -> RowBounds:
    """Return the bounds of the rows that are sent."""
    source = sending.source
    return RowBounds(sizes.shard, sizes.most, source.rows.shape[0], source.starts.shape[0] - 2)


def push_launch(sizes: SendSizes, sending: Sending) -> TileLaunch:
    """Return the launch that sends rows to all peers."""
    source, counts = sending
    counts_args = (COUNTS_CHANNEL, ROWS_CHANNEL, COUNTS) if counts is not None else (None, ROWS_CHANNEL, None)
    row_args = (source, counts, _bounds(sizes, sending), _row_sizes(sizes, PUSH_WARPS, counts is not None))
    arguments = (*counts_args, STAGING, META_STAGING if sizes.metadata else None, *row_args)
    return TileLaunch(push_rows_kernel, (sizes.programs,), arguments, {"num_warps": PUSH_WARPS})


def land_launch(sizes: SendSizes, sending: Sending, placed: Placed) -> TileLaunch:
    """Return the launch that puts received rows together."""
    row_sizes = _row_sizes(sizes, LAND_WARPS)
    steps = -(-sizes.most // row_sizes.step_rows) * -(-sizes.words // row_sizes.step_words)
    landed = (STAGING, META_STAGING if sizes.metadata else None)
    arguments = (COUNTS_CHANNEL, ROWS_CHANNEL, COUNTS, *landed, *sending, _bounds(sizes, sending), *placed, row_sizes)
    return TileLaunch(land_rows_kernel, (max(1, min(LAND_PROGRAMS, steps)),), arguments, {"num_warps": LAND_WARPS})


def add_launch(sizes: SendSizes, sending: Sending, own: Parts, y: torch.Tensor) -> TileLaunch:
    """Return the launch that adds the parts of each token."""
    tokens, width = y.shape
    block = min(ADD_COLUMNS, 1 << (max(width, 1) - 1).bit_length())
    arguments = (ROWS_CHANNEL, STAGING, *own, y, tokens, _bounds(sizes, sending), width, block)
    return TileLaunch(add_rows_kernel, (max(1, min(tokens, ADD_PROGRAMS)),), arguments, {"num_warps": ADD_WARPS})
