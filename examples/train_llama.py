"""Trains a Llama with sequence parallelism, beside the same training by one process.

The model is made of `nn.Linear`s. One plan makes it parallel; its weights are DTensors, and the optimizer is torch's.

python examples/train_llama.py                                   # four emulated ranks, no GPU needed
torchrun --nproc-per-node 4 examples/train_llama.py --cuda       # one rank per GPU
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from driver import device, on_ranks
from models.llama import Llama, Sizes, training_plan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import cross_entropy

STEPS, BATCH, LENGTH = 20, 2, 32


def losses(model: nn.Module, device: torch.device) -> list[float]:
    """Trains a model on sequences that count upwards: the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    found = []
    for step in range(STEPS):
        start = torch.randint(64, (BATCH, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + torch.arange(LENGTH)).to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train() -> list[list[float]]:
    """One rank: the losses of one process, and those of all ranks together."""
    here = device()
    torch.manual_seed(0)
    sizes = Sizes()
    single = Llama(sizes).to(here)
    mesh = init_device_mesh(here.type, (dist.get_world_size(),))
    model = parallelize_module(copy.deepcopy(single), mesh, training_plan(sizes.layers))
    return [losses(single, here), losses(model, here)]


def main() -> None:
    """Trains on emulated ranks, or on the ranks that torchrun started."""
    found = on_ranks(train, timeout_s=200.0)
    if found is None:
        return  # rank 0 tells
    one, all_ranks = found
    print(f"loss of one process: {one[0]:.3f} -> {one[-1]:.3f}")
    print(f"loss of all ranks:   {all_ranks[0]:.3f} -> {all_ranks[-1]:.3f}")
    print(f"largest difference:  {max(abs(a - b) / a for a, b in zip(one, all_ranks, strict=True)):.0e} relative")


if __name__ == "__main__":
    main()
