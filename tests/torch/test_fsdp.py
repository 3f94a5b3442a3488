"""FSDP2 times tensor parallelism on a 2 x 2 mesh of CPU ranks trains as the unsharded model does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from campaigns.torch.small_llama import Llama, Sizes, loss_of, plan
from tests.ranks import run_ranks

STEPS, BATCH = 5, 4


def losses() -> list[tuple[float, float]]:
    """For `run_ranks`: of every step, unsharded and sharded; batches are split over one dimension of the mesh."""
    sizes = Sizes(layers=1)
    torch.manual_seed(0)
    single = Llama(sizes)
    model = copy.deepcopy(single)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan(sizes.layers))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3, foreach=False) for each in (single, model)]
    found = []
    for step in range(STEPS):
        tokens = torch.randint(sizes.vocabulary, (BATCH, 16), generator=torch.Generator().manual_seed(step))
        own = tokens.chunk(2)[mesh["dp"].get_local_rank()]
        run = [loss_of(single, tokens), loss_of(model, own)]
        for loss, optimizer in zip(run, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = run[1].detach().clone()
        dist.all_reduce(mean)
        found.append((run[0].item(), mean.item() / dist.get_world_size()))
    return found


@pytest.mark.slow
def test_fsdp_times_tensor_parallelism():
    for found in run_ranks(losses, 4, timeout_s=120.0):
        for wanted, got in found:
            assert got == pytest.approx(wanted, rel=1e-4)
