"""A row-parallel layer of DeepSpeed's AutoTP, answered by overweave, on the ranks of torchrun."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce
from torch import nn

from overweave.adapters import deepspeed as adapter

deepspeed.init_distributed("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
adapter.register()  # and then deepspeed.init_inference(model, ...), or deepspeed.initialize, as ever
torch.manual_seed(0)
whole, x = nn.Linear(16, 8), torch.randn(3, 16)
wanted = whole(x)
layer = LinearAllreduce(whole, dist.group.WORLD)
y = layer(x.chunk(ranks, 1)[rank].contiguous())
if rank == 0:
    print("as one GPU would:", torch.allclose(y, wanted, atol=1e-5))
adapter.unregister()
