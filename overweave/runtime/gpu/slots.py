"""Launches the combine of experts (kernels/slots.py) on this process's GPU."""

from __future__ import annotations

import torch

from overweave.kernels.arguments import SlotsShape
from overweave.kernels.slots import add_slots_kernel
from overweave.runtime.library.slots import SlotSums

BLOCK, WAVES = 1024, 16  # columns a step; programs for each SM


def add_slots(sums: SlotSums, out: torch.Tensor) -> None:
    """Compute out `[rows, cols]`, contiguous columns, as `runtime.library.slots.add(sums)` does."""
    rows, cols = out.shape
    if not out.numel():
        return
    z, positions, routed, weights, received, rank = sums
    ranks, rank_stride, received_stride = (1, 0, 0) if received is None else (len(received), *received.stride()[:2])
    weights_stride = 0 if weights is None else weights.stride(0)
    shape = SlotsShape(rows, cols, z.stride(0), weights_stride, received_stride, rank_stride, out.stride(0), rank)
    block = min(BLOCK, 1 << (cols - 1).bit_length())
    most = WAVES * torch.cuda.get_device_properties(out.device).multi_processor_count
    programs = min(rows * -(-cols // block), most)
    with torch.cuda.device(out.device):
        add_slots_kernel[(programs,)](
            z, positions, routed, weights, received, out, shape, positions.shape[1], block, ranks
        )
