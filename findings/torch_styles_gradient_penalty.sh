#!/usr/bin/env bash
# A gradient penalty through torch's tensor-parallel styles trains with another gradient than the same layers without
# them, and nothing is said: `torch.autograd.grad(..., create_graph=True)` returns the right gradient of x without its
# history, so that the penalty's part is missing from what is trained with. One rank is enough to see it.
#
# Seen with torch 2.13.0, Python 3.11, gloo on a CPU, 2026-11-29. The history ends where `DTensor.from_local(x, mesh,
# [Replicate()])` is given a gradient that is still to be summed over ranks, as that of every ColwiseParallel is: one
# product with a sharded weight does it. The penalty alone would raise; added to a loss, as penalties are, it does not.
#
# Exits with 0 while that is so, and with 1 once it is not. Needs Python 3.11 or newer and a package index; some minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet "torch==2.13.0" numpy
cat >"$work/penalty.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def layers():
    made = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    for weight in made.parameters():
        nn.init.constant_(weight, 0.125)
    return made


def styled():
    return parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def product(x):
    weight = distribute_tensor(torch.full((8, 4), 0.125), mesh, [Shard(0)])
    return nn.functional.linear(DTensor.from_local(x, mesh, [Replicate()]), weight).to_local()


for name, model in (("plain", layers()), ("styles", styled()), ("a product", product)):
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x).square().sum()
    (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + of_x.square().sum()).backward()
    print(f"{name}: gradient {of_x[0, 0]:.4f}, records {of_x.requires_grad}, of the loss and the penalty {x.grad[0, 0]:.4f}")
dist.destroy_process_group()
PYTHON
"$work/env/bin/python" -W ignore "$work/penalty.py" 2>/dev/null | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
plain: gradient 0.3634, records True, of the loss and the penalty 0.4661
styles: gradient 0.3634, records False, of the loss and the penalty 0.3634
a product: gradient 1.0000, records False, of the loss and the penalty 1.0000
SEEN
