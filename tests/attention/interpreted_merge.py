"""The kernel that merges results of attention, interpreted: `python -m tests.attention.interpreted_merge`. Prints what
is wrong."""

from __future__ import annotations

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import torch  # noqa: E402

from overweave.attention.pieces import merge  # noqa: E402
from overweave.kernels.merge import merge_kernel  # noqa: E402

# batch, heads, rows, columns, the rows of the part, and how many queries see nothing of one or of both
CASES = ((1, 2, 5, 8, (0, 5), 0), (2, 3, 9, 12, (4, 9), 2), (1, 1, 16, 8, (3, 4), 1), (2, 2, 7, 20, (0, 3), 3))
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
BLOCK_ROWS = 4


def drawn(shape: tuple[int, ...], blind: slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A result whose rows stand first in memory, as torch's kernels return it; who sees nothing has zeros."""
    b, h, rows, columns = shape
    out = torch.randn(b, rows, h, columns, generator=DRAW).transpose(1, 2)
    lse = 3 * torch.randn(b, h, rows, generator=DRAW)
    out[:, :, blind], lse[:, :, blind] = 0.0, -torch.inf
    return out.to(dtype), lse


DRAW = torch.Generator().manual_seed(0)


def main() -> None:
    wrong = 0
    for b, h, rows, columns, (begin, end), blind in CASES:
        for given, asked in DTYPES:
            total = drawn((b, h, rows, columns), slice(begin, begin + blind), given)
            part = drawn((b, h, end - begin, columns), slice(0, max(blind - 1, 0)), given)
            for each in part:
                each[:, :, -1] = torch.nan  # which a merge must not hide
            found, wanted = (
                (torch.full((b, h, rows, columns), torch.nan, dtype=asked), torch.full((b, h, rows), torch.nan))
                for _ in range(2)
            )
            steps = (*total[0].stride()[:3], *part[0].stride()[:3])
            block = 1 << (columns - 1).bit_length()
            sizes = (h, rows, begin, end, *steps, columns, BLOCK_ROWS, block)
            merge_kernel[(-(-rows // BLOCK_ROWS), b * h)](*total, *part, *found, *sizes)
            merge(total, part, begin, wanted)
            near = 1e-2 if asked is torch.bfloat16 else 1e-6
            wrong += not torch.allclose(found[0].float(), wanted[0].float(), atol=near, rtol=near, equal_nan=True)
            wrong += not torch.allclose(found[1], wanted[1], atol=1e-5, equal_nan=True)
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
