"""Lowered plans on emulated ranks, beside what DTensor makes of the same tensors: of integers, whose sums are exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from overweave.ir.plan import Plan
from overweave.ir.schedule import OUTPUT, Apply, Region
from overweave.lower import AttentionOp, MatmulOp, Nest, RankMesh, loops, placements
from overweave.lower.nest import read
from overweave.memory.group import Group, resolve, subgroup
from overweave.memory.host.workspace import HostWorkspace
from overweave.runtime.host.emulate import HostCall, HostProgram, IsDone
from overweave.runtime.host.host import run_on_host
from overweave.runtime.scheduler import PendingStep
from tests.lower.nests import Written

TIMEOUT_S = 30.0
Case = tuple[Mapping[str, str], str, str]  # placements of the inputs, of the result, and the path
View = Callable[[Region], Tensor]


class ComputedCall(HostCall):
    """A plan whose Applies plain torch computes."""

    def __init__(self, compute: Callable[[Apply, View], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._compute = compute

    def begin_step(self, step: PendingStep) -> IsDone | None:
        (operation,) = step.operations
        if not isinstance(operation, Apply):
            return super().begin_step(step)
        self._compute(operation, self.memory.view)
        return None


def run_computed(plan: Plan, group: Group, inputs: dict[str, Tensor], op: AttentionOp) -> dict[str, Tensor]:
    program, made = HostProgram.of(plan, group.rank, frozenset()), outputs_of(plan)
    call = ComputedCall(lambda apply, view: attend(apply, view, op), program, group, HostWorkspace.of(group), TIMEOUT_S)
    call.run(inputs, made)
    return made


def joined_on(shape: tuple[int, ...]) -> tuple[Group, Any]:
    """The group, whose parts along the mesh are made first and in one order: torch names a part by those that a rank
    knows already, and a mesh of torch's makes more of them."""
    logging.disable(logging.WARNING)
    group, mesh = resolve(None), RankMesh(shape)
    for axis in range(len(shape)):
        subgroup(group, mesh.line(group.rank, axis))
    return group, init_device_mesh("cpu", shape)


def placed(words: str) -> list[Placement]:
    """`R S0 P`: one for each dimension of a mesh."""
    known = {"R": Replicate(), "P": Partial()}
    return [known[word] if word in known else Shard(int(word[1:])) for word in words.split()]


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def distributed(whole: Tensor, mesh: Any, words: str) -> DTensor:
    """A tensor on a mesh; partial sums are each rank's own."""
    each = words.split()
    shards = distribute_tensor(whole, mesh, placed(words.replace("P", "R")))
    scale = 1 + sum(at for at, word in zip(mesh.get_coordinate(), each, strict=True) if word == "P")
    local = shards.to_local() * scale
    return DTensor.from_local(local, mesh, placed(words), run_check=False, shape=whole.shape, stride=whole.stride())


def outputs_of(plan: Plan) -> dict[str, Tensor]:
    found = (each for each in plan.schedule.buffers if each.home == OUTPUT)
    return {each.name: torch.full((each.rows, each.cols), torch.nan) for each in found}


def matmul_faults(shape: tuple[int, ...], op: MatmulOp, cases: Sequence[Case]) -> list[str]:
    """Of each case what is not, bit for bit, what DTensor has."""
    group, mesh = joined_on(shape)
    x, w = integers(1, op.m, op.k), integers(2, op.k, op.n)
    faults = []
    for inputs, outputs, path in cases:
        words = {name: each.split() for name, each in inputs.items()}
        lowered = placements(op, inputs=words, outputs=outputs.split(), mesh=RankMesh(shape), path=path)  # type: ignore[arg-type]
        dx, dw = distributed(x, mesh, inputs["x"]), distributed(w, mesh, inputs["w"])
        made = torch.matmul(summed(dx), summed(dw))
        for plan in filter(None, (lowered.plan, lowered.fused)):
            y = outputs_of(plan)
            run_on_host(plan, group, {"x": dx.to_local(), "w": dw.to_local()}, y, timeout_s=TIMEOUT_S)
            if not is_same(y["y"], made, mesh, outputs):
                faults.append(f"{inputs} {outputs} {path} {plan.name} on rank {group.rank}")
    return faults


def summed(one: DTensor) -> DTensor:
    """What DTensor multiplies without a doubt."""
    return one.redistribute(placements=[Replicate() if place.is_partial() else place for place in one.placements])


def is_same(y: Tensor, made: DTensor, mesh: Any, outputs: str) -> bool:
    if "P" not in outputs:
        wanted = made.redistribute(placements=placed(outputs)).to_local()
        return bool(torch.equal(y[: wanted.shape[0], : wanted.shape[1]], wanted))
    stride = made.stride()
    held = DTensor.from_local(y, mesh, placed(outputs), run_check=False, shape=made.shape, stride=stride)
    return bool(torch.equal(held.full_tensor(), made.full_tensor()))


def attention_faults(shape: tuple[int, ...], op: AttentionOp, cases: Sequence[Case]) -> list[str]:
    """The same of attention without its softmax, `(q k^T) v`, of which every sum is exact."""
    group, mesh = joined_on(shape)
    whole, faults = wholes(op), []
    for inputs, outputs, path in cases:
        words = {name: each.split() for name, each in inputs.items()}
        lowered = placements(op, inputs=words, outputs=outputs.split(), mesh=RankMesh(shape), path=path)  # type: ignore[arg-type]
        own = {name: as_matrix(distributed(whole[name], mesh, each).to_local()) for name, each in inputs.items()}
        made = run_computed(lowered.plan, group, own, op)
        wanted = as_matrix(distributed(whole["o"], mesh, outputs).to_local())
        if not torch.equal(made["o"][: wanted.shape[0], : wanted.shape[1]], wanted):
            faults.append(f"{inputs} {outputs} {path} on rank {group.rank}")
    return faults


def nest_faults(op: MatmulOp | AttentionOp, nests: Mapping[str, Written], path: str) -> list[str]:
    """Of each nest, on as many ranks as there are, what is not bit for bit the whole product's."""
    faults: list[str] = []
    for name, (shape, words) in nests.items():
        group, mesh = joined_on(shape)
        nest = Nest(op, words)
        homes = {tensor: " ".join(each) for tensor, each in read(nest, RankMesh(shape)).homes.items()}
        plan = loops(nest, mesh=RankMesh(shape), path=path).plan  # type: ignore[arg-type]
        whole = wholes(op)
        own = {tensor: distributed(each, mesh, homes[tensor]).to_local() for tensor, each in whole.items()}
        if isinstance(op, MatmulOp):
            wanted, made = own.pop("y"), outputs_of(plan)
            run_on_host(plan, group, own, made, timeout_s=TIMEOUT_S)
        else:
            own = {tensor: as_matrix(each) for tensor, each in own.items()}
            wanted, made = own.pop("o"), run_computed(plan, group, own, op)
        (found,) = made.values()
        if not torch.equal(found[: wanted.shape[0], : wanted.shape[1]], wanted):
            faults.append(f"{name} {path} on rank {group.rank}")
    return faults


def wholes(op: MatmulOp | AttentionOp) -> dict[str, Tensor]:
    """All tensors, the result last."""
    if isinstance(op, MatmulOp):
        x, w = integers(1, op.m, op.k), integers(2, op.k, op.n)
        return {"x": x, "w": w, "y": x @ w}
    q, k, v = (integers(seed, op.batch, op.heads, op.rows, op.head_dim) for seed in (1, 2, 3))
    return {"q": q, "k": k, "v": v, "o": (q @ k.transpose(2, 3)) @ v}


def as_matrix(tensor: Tensor) -> Tensor:
    """`[batch, heads, rows, head_dim]` as `[batch * rows, heads * head_dim]`."""
    batch, heads, rows, width = tensor.shape
    return tensor.transpose(1, 2).reshape(batch * rows, heads * width).contiguous()


def attend(apply: Apply, view: View, op: AttentionOp) -> None:
    """What is needed of each tensor, in its place in the whole; then all that is made. Pieces are added."""
    shape = (op.batch, op.rows, op.heads, op.head_dim)
    whole = {need.tensor: torch.zeros(op.batch * op.rows, op.heads * op.head_dim) for need in apply.needs}
    for need in apply.needs:
        rows, cols = need.region.shape
        whole[need.tensor][need.row : need.row + rows, need.col : need.col + cols] = view(need.region)
    if apply.function == "merge":
        o = sum(whole.values(), torch.zeros(()))
    else:
        q, k, v = (whole[name].reshape(shape).transpose(1, 2) for name in ("q", "k", "v"))
        o = as_matrix((q @ k.transpose(2, 3)) @ v)
    for goal in apply.makes:
        rows, cols = goal.region.shape
        view(goal.region).copy_(o[goal.row : goal.row + rows, goal.col : goal.col + cols])
