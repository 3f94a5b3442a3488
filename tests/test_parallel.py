"""`overweave.parallel`: a plan of torch's styles behind another import line does what it did, and is fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs

from overweave import parallel as ours
from overweave.adapters import report
from tests.ranks import run_ranks


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, scale: float, *, beside: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x)) * self.gate(beside) * scale)
        return y


def results(styles: Any, is_local: bool, is_compiled: bool) -> list[torch.Tensor]:
    """y and all gradients. styles: the module that the plan is imported from."""
    torch.manual_seed(0)
    module, mesh = Gated(), init_device_mesh("cpu", (dist.get_world_size(),))
    prepared = styles.PrepareModuleInput(
        input_layouts=(Shard(1), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"beside": Shard(1)},
        desired_input_kwarg_layouts={"beside": Replicate()},
        use_local_output=is_local,
    )
    columns, rows = styles.ColwiseParallel(), styles.RowwiseParallel(output_layouts=Shard(1))
    styles.parallelize_module(module, mesh, {"": prepared, "up": columns, "gate": columns, "down": rows})
    x = torch.randn(2, 8, 16).chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_()
    call = torch.compile(module, backend="aot_eager") if is_compiled else module
    y = call(x, 2.0, beside=x)
    y.square().sum().backward()
    gradients = [each.grad.full_tensor() for each in module.parameters()]  # type: ignore[union-attr,operator]
    return [y.detach(), x.grad, *gradients]  # type: ignore[list-item]


def unlike(is_compiled: bool) -> list[str]:
    """For `run_ranks`: what differs from torch's styles, or is not fused."""
    found = []
    for is_local in (False, True):
        report.SITES.clear()
        pairs = zip(results(ours, is_local, is_compiled), results(torchs, is_local, is_compiled), strict=True)
        found += [f"{is_local}: {index}" for index, pair in enumerate(pairs) if not torch.allclose(*pair, atol=1e-5)]
        gathers = report.SITES["PrepareGather"] if not is_compiled else None
        if gathers is not None and (gathers.by_overweave, gathers.by_torch) != (2, {}):
            found.append(f"{is_local}: {gathers.by_overweave} gathers of 2 by overweave")
    return found


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_plan_does_what_it_did(is_compiled: bool):
    assert run_ranks(unlike, 2, is_compiled) == [[]] * 2


def kept_for_torch() -> str:
    """Layouts that no style of overweave has, and arguments that do not fit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = nn.Identity()
    prepared = ours.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True)
    ours.parallelize_module(module, mesh, {"": prepared})
    assert module(torch.ones(4, 2)).shape == (2, 2)
    with pytest.raises(ValueError, match="same length"):
        module(torch.ones(4, 2), torch.ones(4, 2))
    return "ok"


def test_what_no_style_has_is_torchs():
    assert run_ranks(kept_for_torch, 2) == ["ok"] * 2


def test_every_name_of_torch_is_there():
    assert set(torchs.__all__) <= set(ours.__all__)
