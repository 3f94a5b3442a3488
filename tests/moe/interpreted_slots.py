"""The kernel of sums over slots, interpreted: `python -m tests.moe.interpreted_slots`. Prints what is wrong."""

from __future__ import annotations

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import torch  # noqa: E402

from overweave.kernels.arguments import SlotsShape  # noqa: E402
from overweave.kernels.slots import add_slots_kernel  # noqa: E402
from overweave.runtime.library import slots as library  # noqa: E402
from overweave.runtime.library.slots import SlotSums  # noqa: E402


def main() -> None:
    draw, wrong = torch.Generator().manual_seed(0), 0
    cases = (
        (5, 3, 20, 12, True, 0, 2),
        (7, 1, 16, 7, False, 3, 3),
        (3, 8, 9, 20, True, 2, 8),
        (4, 2, 8, 0, True, 2, 1),
    )
    for rows, slots, cols, routed, weighed, ranks, programs in cases:
        z = torch.randn(rows * slots, cols, generator=draw)
        z[routed:] = torch.nan
        places = torch.randperm(rows * slots, generator=draw).int().view(rows, slots)
        weights = torch.rand(rows, slots + 1, generator=draw)[:, 1:] if weighed else None
        landed = torch.randn(ranks, rows + 1, cols + 3, generator=draw)[:, 1:, 3:] if ranks else None
        if landed is not None:
            landed[ranks - 1] = torch.nan
        sums = SlotSums(z, places, torch.tensor([routed], dtype=torch.int32), weights, landed, max(0, ranks - 1))
        out = torch.full((rows, cols + 1), torch.nan)[:, :cols]
        steps = (0, 0) if landed is None else landed.stride()[1::-1]
        shape = SlotsShape(rows, cols, cols, 0 if weights is None else slots + 1, *steps, cols + 1, sums.rank)
        add_slots_kernel[(programs,)](*sums[:5], out, shape, slots, 8, ranks)
        wrong += not torch.equal(out, library.add(sums))
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
