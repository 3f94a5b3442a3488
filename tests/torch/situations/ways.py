"""The ways in which a module of the table is cut over ranks, as data: what stands for its layers.

`sequence`: ranks share out rows of the input and of the result; else both are whole on every rank. Where layers gather,
and not the boundary of the module, nothing can read the whole input beside them: such a way takes no such module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.functional import linear

import overweave as ow
from overweave.errors import MachineError
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from overweave.layers.linear import own_shard
from overweave.layers.replicated import replicated_linear
from tests.torch.situations.models import ALL, OUTSIDE, Attention, Scaled, Situated, Tied

try:
    from overweave.adapters import transformers as adapter
except MachineError:  # no package to adapt
    adapter = None  # type: ignore[assignment]

Cut = Callable[[Situated, DeviceMesh, DeviceMesh], Situated]  # of the layers, and of the boundary of the module


class Way(NamedTuple):
    """cut: a whole module as this rank holds it. gathers_inside: see above. is_plan: whether `report()` counts it.
    sums_biases: of the last layer, whose gradient is of all rows; else of this rank's alone. is_compiled: by Inductor,
    with overweave's pass."""

    cut: Cut
    sequence: bool
    gathers_inside: bool = False
    is_plan: bool = False
    sums_biases: bool = True
    is_torchs: bool = False
    is_compiled: bool = False

    def takes(self, model: str) -> bool:
        if model in OUTSIDE:  # whose layers only a plan keeps
            return self.is_plan or self.is_torchs
        return not self.gathers_inside or model not in ("router", "normed")


def by_plan(sequence: bool, by_overweave: bool = True) -> Cut:
    """By `parallelize_module`, with overweave's styles or with torch's."""

    def cut(model: Situated, mesh: DeviceMesh, boundary: DeviceMesh) -> Situated:
        columns, rows = (ow.Colwise, ow.Rowwise) if by_overweave else (ColwiseParallel, RowwiseParallel)
        plan: dict[str, Any] = {name: columns() for name in model.columns}
        plan |= {name: rows(output_layouts=Shard(1)) if sequence else rows() for name in model.rows}
        parallelize_module(model, mesh, plan)
        if sequence and by_overweave:
            parallelize_module(model, boundary, ow.PrepareGather(input_layouts=Shard(1)))
        elif sequence:
            style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
            parallelize_module(model, boundary, style)
        return model

    return cut


def by_layers(sequence: bool) -> Cut:
    """By overweave's modules."""

    def cut(model: Situated, mesh: DeviceMesh, _: DeviceMesh) -> Situated:
        dim = 1 if sequence else None
        for name, kind in _layers(model, ow.ColumnParallelLinear, ow.RowParallelLinear):
            whole = getattr(model, name)
            made = kind.of(_plain(whole), mesh, dim=dim)
            setattr(model, name, Tripled(made) if isinstance(whole, Scaled) else made)
        return model

    return cut


def by_transformers(model: Situated, mesh: DeviceMesh, _: DeviceMesh) -> Situated:
    """By overweave's styles of Transformers, as a model's plan applies them."""
    for name, kind in _layers(model, adapter.Colwise, adapter.Rowwise):
        layer, style = model.get_submodule(name), kind()
        for parameter in ("weight", "bias"):
            style.shard_param(layer, parameter, mesh)
        style.install_forward(layer, mesh)
    return model


def by_functions(kind: type[Called]) -> Callable[[bool], Cut]:
    """By modules that call functions with parts of weights that are plain tensors."""

    def of(sequence: bool) -> Cut:
        def cut(model: Situated, mesh: DeviceMesh, _: DeviceMesh) -> Situated:
            for name, is_column in _layers(model, True, False):
                whole = getattr(model, name)
                made = kind(whole, mesh, is_column, sequence)
                setattr(model, name, Tripled(made) if isinstance(whole, Scaled) else made)
            return model

        return cut

    return of


class Called(nn.Module):
    """A linear layer of functions of `overweave.functional`."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, is_column: bool, sequence: bool) -> None:
        super().__init__()
        self.group, self.is_column, self.sequence = mesh.get_group(), is_column, sequence
        self.weight = own_shard(whole.weight, 0 if is_column else 1, self.group, "weight")
        self.bias = self._own_bias(whole.bias)

    def _own_bias(self, whole: torch.Tensor | None) -> nn.Parameter | None:
        if whole is None:
            return None
        return own_shard(whole, 0, self.group, "bias") if self.is_column else nn.Parameter(whole.detach().clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> Called:
        made = self.__class__.__new__(self.__class__)
        nn.Module.__init__(made)
        made.group, made.is_column, made.sequence = self.group, self.is_column, self.sequence
        made.weight, made.bias = copy.deepcopy((self.weight, self.bias), memo)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_column and self.sequence:
            return all_gather_linear(x, self.weight, self.bias, self.group, dim=1)
        if self.is_column:
            return replicated_linear(x, self.weight, self.bias, self.group)
        if self.sequence:
            return linear_reduce_scatter(x, self.weight, self.bias, self.group, dim=1)
        return linear_all_reduce(x, self.weight, self.bias, self.group)


class Installed(Called):
    """A linear layer of torch's fused operators, which `overweave.install` answers. Autocast is the caller's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        operators, name = torch.ops.symm_mem, self.group.group_name
        if self.is_column:
            _, (y,) = operators.fused_all_gather_matmul(x.contiguous(), [weight.t()], 1, name)
        else:
            y = operators.fused_matmul_reduce_scatter(x.contiguous(), weight.t(), "sum", 1, name)
        return y if bias is None else y + bias


class Collective(Called):
    """A linear layer beside torch's functional collectives, which `install(graphs=True)` fuses where it is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_column:
            return linear(all_gather_tensor_autograd(x, 1, self.group), self.weight, self.bias)
        y = reduce_scatter_tensor_autograd(linear(x, self.weight), "sum", 1, self.group)
        return y if self.bias is None else y + self.bias


class Tripled(nn.Module):
    """What `Scaled` does, around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 3.0


def _layers(model: Situated, column: Any, row: Any) -> list[tuple[str, Any]]:
    return [(name, column) for name in model.columns] + [(name, row) for name in model.rows]


def _plain(whole: nn.Linear) -> nn.Linear:
    """The layer without a forward of its own."""
    made = nn.Linear(whole.in_features, whole.out_features, whole.bias is not None)
    made.weight, made.bias = whole.weight, whole.bias
    return made


def torchs(sequence: bool) -> Way:
    """torch's styles, of a module whose ranks share out rows or do not."""
    return Way(by_plan(sequence, by_overweave=False), sequence, is_torchs=True)


WAYS: dict[str, Way] = {
    "torch's styles, sequence": torchs(True),
    "styles, sequence": Way(by_plan(True), True, is_plan=True),
    "styles, whole": Way(by_plan(False), False, is_plan=True),
    "layers, sequence": Way(by_layers(True), True, gathers_inside=True),
    "layers, whole": Way(by_layers(False), False),
    "functional, sequence": Way(by_functions(Called)(True), True, gathers_inside=True),
    "functional, whole": Way(by_functions(Called)(False), False),
    "install, sequence": Way(by_functions(Installed)(True), True, gathers_inside=True, sums_biases=False),
    "install compiled, sequence": Way(
        by_functions(Collective)(True), True, gathers_inside=True, sums_biases=False, is_compiled=True
    ),
}

if adapter is not None:
    WAYS["Transformers, whole"] = Way(by_transformers, False, is_plan=True)


def cut_model(name: str, way: Way, mesh: DeviceMesh, boundary: DeviceMesh | None = None) -> tuple[Situated, Situated]:
    """A whole module, and the same as this rank holds it."""
    torch.manual_seed(7)
    single, model = ALL[name](), ALL[name]()
    model.load_state_dict(single.state_dict())
    model = way.cut(model, mesh, boundary or mesh)
    if isinstance(model, Attention):
        model.parts = mesh.size()
    if isinstance(model, Tied):
        inner = [getattr(each, "inner", each) for each in (model.one, model.other)]
        inner[1].weight = inner[0].weight
    if way.sequence:
        model.own = lambda whole: whole.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    return single, model


def whole_gradient(parameter: nn.Parameter, like: nn.Parameter) -> torch.Tensor | None:
    """The gradient of a parameter, which is cut along the dimension in which its shape differs, of the whole one."""
    found: Any = parameter.grad
    if found is None or isinstance(found, DTensor):
        return None if found is None else found.full_tensor()
    cut = [dim for dim, (a, b) in enumerate(zip(found.shape, like.shape, strict=True)) if a != b]
    if not cut:
        return found
    parts = [torch.empty_like(found) for _ in range(like.shape[cut[0]] // found.shape[cut[0]])]
    dist.all_gather(parts, found.contiguous())
    return torch.cat(parts, cut[0])
