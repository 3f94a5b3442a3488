"""Launches the row-wise fp8 quantisation (kernels/quantise.py) on this process's GPU."""

from __future__ import annotations

import torch

from overweave.kernels.quantise import quantise_rows_kernel

BLOCK, WAVES = 2048, 8  # columns a step; programs for each SM


def quantise_rows(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise x `[rows, cols]` of contiguous rows: fill values, fp8, contiguous, and scales, fp32 `[rows]`."""
    rows, cols = x.shape
    if rows:
        programs = min(rows, WAVES * torch.cuda.get_device_properties(x.device).multi_processor_count)
        block = min(BLOCK, 1 << max(0, cols - 1).bit_length())
        largest = torch.finfo(values.dtype).max
        with torch.cuda.device(x.device):
            quantise_rows_kernel[(programs,)](x, values, scales, rows, cols, x.stride(0), largest, block)
