"""Sums over slots on this process's GPU."""

from __future__ import annotations

import torch

from overweave.kernels.arguments import SlotsShape
from overweave.kernels.slots import add_slots_kernel
from overweave.runtime.library.slots import SlotSums

BLOCK, WAVES = 1024, 16  # columns a step; programs for each SM


def add_slots(sums: SlotSums, out: torch.Tensor) -> None:
    """`out = library.slots.add(sums)`; out `[rows, cols]`, with columns side by side."""
    rows, cols = out.shape
    if not out.numel():
        return
    z, places, routed, weights, landed, rank = sums
    ranks, rank_step, landed_step = (1, 0, 0) if landed is None else (len(landed), *landed.stride()[:2])
    weights_step = 0 if weights is None else weights.stride(0)
    shape = SlotsShape(rows, cols, z.stride(0), weights_step, landed_step, rank_step, out.stride(0), rank)
    block = min(BLOCK, 1 << (cols - 1).bit_length())
    most = WAVES * torch.cuda.get_device_properties(out.device).multi_processor_count
    programs = min(rows * -(-cols // block), most)
    with torch.cuda.device(out.device):
        add_slots_kernel[(programs,)](z, places, routed, weights, landed, out, shape, places.shape[1], block, ranks)
