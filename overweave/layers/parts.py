"""This rank's shard of a whole weight, as a parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from overweave.errors import InputError
from overweave.memory.group import GroupLike, process_group_of


def own_shard(whole: torch.Tensor, dim: int, group: GroupLike, name: str) -> nn.Parameter:
    """Return this rank's shard of a weight along a dimension, as a copy; with a DeviceMesh a DTensor.

    name: of the weight, in errors. Raises InputError if the number of ranks does not divide the dimension.
    """
    process_group = process_group_of(group)
    ranks, rank = process_group.size(), process_group.rank()
    if whole.shape[dim] % ranks:
        found = f"{whole.shape[dim]} does not divide by {ranks} ranks"
        raise InputError(f"{name}, cut along dimension {dim}", found, "Choose a width that does, or fewer ranks")
    part = whole.detach().chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
    if isinstance(group, DeviceMesh):
        part = DTensor.from_local(part, group, [Shard(dim)], run_check=False)
    return nn.Parameter(part, requires_grad=whole.requires_grad)
