"""Rows go to the ranks whose weights they need, as tokens to experts: blocks of any size, and one plan for all.

    python examples/09_uneven_blocks.py

Four emulated ranks hold one expert each. In every step each rank routes its tokens anew: the plan is made once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import overweave as ow
from overweave.runtime.host.processes import run_ranks

RANKS, TOKENS, WIDTH, HIDDEN = 4, 24, 32, 64


def steps() -> str:
    """One rank's part: what its expert makes of the tokens that all ranks send it, step by step."""
    rank, chance = dist.get_rank(), torch.Generator().manual_seed(0)  # the same routing is drawn on every rank
    w = torch.randn(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(rank))
    received = []
    for _ in range(3):
        experts = torch.randint(0, RANKS, (RANKS, TOKENS), generator=chance).clamp(max=2)  # nobody asks for the last
        tokens = torch.randn(RANKS, TOKENS, WIDTH, generator=chance)
        counts = torch.stack([torch.bincount(chosen, minlength=RANKS) for chosen in experts])
        order = experts[rank].argsort(stable=True)  # the block for expert 0 first

        y = ow.all_to_all_matmul(tokens[rank][order], w, counts=counts, most=TOKENS)

        mine = torch.cat([tokens[source][experts[source] == rank] for source in range(RANKS)])
        torch.testing.assert_close(y, mine @ w, rtol=1e-4, atol=1e-4)
        received.append(len(y))
    return f"expert {rank} multiplied {', '.join(map(str, received))} tokens"


def main() -> None:
    print("\n".join(run_ranks(steps, RANKS)))


if __name__ == "__main__":
    main()
