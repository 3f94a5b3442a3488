"""A program that calls torch's fused operators, which overweave answers, on the ranks of torchrun."""

import torch
import torch.distributed as dist

import overweave as ow

dist.init_process_group("gloo")
ow.install()
torch.manual_seed(0)
weight = torch.randn(16, 8)
x = torch.randn(2, 4, 16, requires_grad=True)  # batch, this rank's part of the sequence, features
_, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 1, dist.group.WORLD.group_name)
y.sum().backward()
if dist.get_rank() == 0:
    print(list(y.shape), list(x.grad.shape))
    print(ow.report())
ow.uninstall()
dist.destroy_process_group()
