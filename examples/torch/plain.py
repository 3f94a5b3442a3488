"""A feed-forward layer whose collectives run beside its matmuls, forward and backward, on the ranks of torchrun."""

import torch
import torch.distributed as dist

from overweave.functional import all_gather_linear, linear_reduce_scatter

dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(rank)
x = torch.randn(2, 8, 16, requires_grad=True)  # batch, this rank's part of the sequence, features
up = torch.randn(64 // ranks, 16, requires_grad=True)  # as torch.nn.functional.linear takes it
down = torch.randn(16, 64 // ranks, requires_grad=True)
hidden = all_gather_linear(x, up, dim=1, activation="silu")
y = linear_reduce_scatter(hidden, down, dim=1)
y.sum().backward()
if rank == 0:
    print(list(hidden.shape), list(y.shape), list(up.grad.shape))
dist.destroy_process_group()
