"""Sums over slots on this process's GPU."""

from __future__ import annotations

import torch

from overweave.kernels.slots import add_slots_kernel

BLOCK, WAVES = 1024, 8  # columns a step; programs for each SM


def add_slots(parts: torch.Tensor, is_there: torch.Tensor | None, out: torch.Tensor) -> None:
    """`out[row] = parts[row].sum(0)`: parts `[rows, slots, cols]`, any steps but between columns; out `[rows, cols]`,
    contiguous. is_there: bool `[rows, slots]`, contiguous."""
    rows, slots, cols = parts.shape
    if not out.numel():
        return
    mask = out if is_there is None else is_there.view(torch.int8)
    programs = min(rows, WAVES * torch.cuda.get_device_properties(out.device).multi_processor_count)
    steps = parts.stride()[:2]
    block = min(BLOCK, 1 << (cols - 1).bit_length())
    with torch.cuda.device(out.device):
        add_slots_kernel[(programs,)](parts, mask, out, rows, cols, *steps, slots, block, is_there is not None)
