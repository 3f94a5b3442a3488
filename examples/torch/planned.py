"""A model that torch's parallelize_module cuts by overweave's styles, on the ranks of torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import overweave as ow

dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))
x = torch.randn(2, 8 * ranks, 16)
wanted = model(x).chunk(ranks, 1)[rank]
plan = {"0": ow.Colwise(input_layouts=Shard(1)), "2": ow.Rowwise(output_layouts=Shard(1))}
parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
y = model(x.chunk(ranks, 1)[rank])
y.sum().backward()
if rank == 0:
    print("as one GPU would:", torch.allclose(y, wanted, atol=1e-5), *model.state_dict())
dist.destroy_process_group()
