"""A tensor-parallel MLP in which every rank has every row, as in decoding: its second half is one `matmul_all_reduce`.

What a transformer does next, a residual and an RMSNorm, happens in the same pass, and is tried too.

python examples/04_all_reduce.py                                   # four emulated ranks, no GPU needed
torchrun --nproc-per-node 4 examples/04_all_reduce.py --cuda       # one rank per GPU
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from driver import device, on_ranks

import overweave as ow

TOKENS, HIDDEN, INNER = (1, 64, 256), 64, 256
PLANS = ("sequential", "one_shot_packed", "two_shot_packed", "two_shot", "ring_stored")


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, plan: str | None = None) -> torch.Tensor:
    """`relu(x @ up) @ down`, of which each rank has its columns of `up` and its rows of `down`: x, y `[m, hidden]`."""
    return ow.matmul_all_reduce(torch.relu(x @ up), down, plan=plan)


def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, norm: ow.RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, then `z = y + residual` and its RMSNorm: returns (normed, z), the next layer's input and residual."""
    return ow.matmul_all_reduce(torch.relu(x @ up), down, norm=norm)


def try_plans() -> list[str]:
    """One rank: what differs between plans, ranks or from plain torch. Every rank of the world runs it.

    The numbers are small integers, which bf16 adds exactly in any order: there must be no difference.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = device()
    torch.manual_seed(rank)
    up = torch.randint(-1, 2, (HIDDEN, INNER // world_size), device=here).bfloat16()
    down = (torch.rand((INNER // world_size, HIDDEN), device=here) < 1 / 64).bfloat16()
    wrong = []
    for tokens in TOKENS:
        torch.manual_seed(tokens)  # every rank has the same rows
        x = (torch.rand((tokens, HIDDEN), device=here) < 1 / 8).bfloat16()
        wanted = torch.relu(x @ up) @ down
        dist.all_reduce(wanted)
        wrong += [f"{plan} m={tokens}" for plan in (None, *PLANS) if not torch.equal(mlp(x, up, down, plan), wanted)]
        weight = torch.linspace(0.5, 1.5, HIDDEN, device=here).bfloat16()
        normed, z = block(x, up, down, ow.RmsNorm(weight, residual=x, eps=1e-5))
        wanted_norm = torch.nn.functional.rms_norm(wanted + x, (HIDDEN,), weight, 1e-5)
        is_near = torch.allclose(normed, wanted_norm, rtol=2**-7)  # a kernel may round the last bit otherwise
        wrong += [] if torch.equal(z, wanted + x) and is_near else [f"norm m={tokens}"]
    ow.check()  # on a GPU calls return before they have ended: this waits, and raises what went wrong
    if rank == 0:
        print(f"{len(TOKENS)} numbers of tokens, {len(PLANS)} plans and our choice: {wrong or 'all equal plain torch'}")
        print(ow.explain("matmul_all_reduce", m=64, n=4096, k=4096 // world_size, world_size=world_size))
    return wrong


if __name__ == "__main__":
    on_ranks(try_plans)
