"""What Python does for a module of a plan: the query, key, value and output layers of an attention.

The group is one CPU rank. Ranks share out the rows of the input (`sequence`) or have all.

`python -m campaigns.host_path --styles` runs it, on other checkouts of overweave, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import overweave as ow
from campaigns.host.host_path import counted, timed_us

ROWS, K, N, WARM = 8, 128, 256, 20


class Cost(NamedTuple):
    """Of one call: functions of Python, of C, and how long it takes."""

    calls: int
    builtin: int
    us: float


class Attention(nn.Module):
    """The linear layers, and as little as can be between them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, N, bias=False) for _ in range(3))
        self.o = nn.Linear(N, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[S, k]`."""
        y: torch.Tensor = self.o(self.q(x) * self.k(x) + self.v(x))
        return y


def plan(sequence: bool) -> dict[str, Any]:
    """The styles of the layers. sequence: ranks share out the rows of the input and of the result."""
    found: dict[str, Any] = {name: ow.Colwise() for name in "qkv"}
    found["o"] = ow.Rowwise(output_layouts=Shard(0)) if sequence else ow.Rowwise()
    return found | ({"": ow.PrepareGather(input_layouts=Shard(0))} if sequence else {})


def costs(calls: int) -> dict[str, Cost]:
    """Of every pass of every plan. calls: over how many a time is the mean; 0: it is not asked for."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, found = init_device_mesh("cpu", (1,)), {}
        for sequence in (True, False):
            model = parallelize_module(Attention(), mesh, plan(sequence))
            for name, call in _passes(model).items():
                for _ in range(WARM):
                    call()
                count = counted(call)
                where = "sequence" if sequence else "whole"
                found[f"{where}, {name}"] = Cost(count.calls, count.builtin, timed_us(call, calls))
        return found
    finally:
        dist.destroy_process_group()


def _passes(model: nn.Module) -> dict[str, Callable[[], object]]:
    x, of_y = torch.randn(ROWS, K, requires_grad=True), torch.randn(ROWS, K)

    def without_gradients() -> None:
        with torch.no_grad():
            model(x)

    return {
        "no gradients": without_gradients,
        "forward": lambda: model(x),
        "forward and backward": lambda: model(x).backward(of_y),
    }


if __name__ == "__main__":
    print(json.dumps(costs(int(sys.argv[1]))))
