"""Launches the merge of two attention results (kernels/merge.py) on this process's GPU."""

from __future__ import annotations

import torch

from overweave.kernels.merge import merge_kernel

BLOCK_ELEMENTS, WARPS = 4096, 4  # of a program


def merge(
    total: tuple[torch.Tensor, torch.Tensor],
    part: tuple[torch.Tensor, torch.Tensor],
    begin: int,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Merge attention result `total` with `part`, which has its rows from `begin` on, into `out`.

    Each is a result `[b, h, s, d]`, contiguous along d, and its log-sum-exp `[b, h, s]`, fp32. out is contiguous.
    """
    result, lse = out
    b, h, rows, columns = result.shape
    if not result.numel():
        return
    block_columns = 1 << (columns - 1).bit_length()
    block_rows = max(1, BLOCK_ELEMENTS // block_columns)
    grid = (-(-rows // block_rows), b * h)
    lses = total[1].contiguous(), part[1].contiguous()
    steps = (*total[0].stride()[:3], *part[0].stride()[:3])
    end = begin + part[0].shape[2]
    with torch.cuda.device(result.device):
        merge_kernel[grid](
            total[0], lses[0], part[0], lses[1], result, lse, h, rows, begin, end, *steps, columns, block_rows,
            block_columns, num_warps=WARPS,
        )  # fmt: skip
