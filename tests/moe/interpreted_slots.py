"""The kernel of sums over slots, interpreted: `python -m tests.moe.interpreted_slots`. Prints what is wrong."""

from __future__ import annotations

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import torch  # noqa: E402

from overweave.kernels.slots import add_slots_kernel  # noqa: E402


def main() -> None:
    draw, wrong = torch.Generator().manual_seed(0), 0
    for rows, slots, cols, masked, programs in ((5, 3, 20, True, 2), (7, 1, 16, False, 3), (3, 8, 9, True, 8)):
        parts = torch.randn(slots, rows, cols, generator=draw).transpose(0, 1)
        there = torch.rand(rows, slots, generator=draw) < 0.6
        held = torch.where(there.unsqueeze(2), parts, torch.nan) if masked else parts
        held = held.transpose(0, 1).contiguous().transpose(0, 1)
        out = torch.full((rows, cols), torch.nan)
        steps = held.stride()[:2]
        add_slots_kernel[(programs,)](held, there.view(torch.int8), out, rows, cols, *steps, slots, 8, masked)
        wanted = torch.zeros(rows, cols)
        for slot in range(slots):
            wanted += torch.where(there[:, slot, None], parts[:, slot], 0.0) if masked else parts[:, slot]
        wrong += not torch.equal(out, wanted)
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
