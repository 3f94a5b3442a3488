"""Transformers' tensor parallelism with overlapped collectives: `register()`, before a model is loaded.

    from overweave.adapters import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=8))

Transformers' styles `colwise` and `rowwise`, which the plans of its models name, are replaced under these names, the
only ones that PEFT knows. Weights stay the DTensors that Transformers makes of them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from overweave.adapters.packages import names_of, obstacle_of
from overweave.adapters.report import site
from overweave.adapters.transformers_experts import register_experts
from overweave.errors import InputError
from overweave.functional import linear_all_reduce, linear_reduce_scatter
from overweave.layers.linear import local
from overweave.layers.replicated import replicated_linear

with names_of("transformers"):
    from transformers.distributed import tensor_parallel as stock
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES  # it lives elsewhere from 5.22

SITES = " of Transformers"  # suffix of the styles' names in `overweave.report()`


class Colwise(stock.ColwiseParallel):  # type: ignore[misc]  # transformers has no types
    """Each rank computes its columns; the all-reduce of the input's gradient overlaps with its matmul."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Replace the forward of a linear layer whose output stays sharded. Any other layer stays Transformers'."""
        is_supported = self.use_local_output and self.output_layouts == Shard(-1) and self.input_layouts == Replicate()
        reason = _layer_obstacle(module, is_supported)
        super().install_forward(module, mesh)
        return _with_forward(module, (self, mesh), reason)


class Rowwise(stock.RowwiseParallel):  # type: ignore[misc]
    """Each rank multiplies its columns of the input; the sum over ranks overlaps with the matmul."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Let the style shard a layer, and replace the forward of a plain linear layer with a supported layout."""
        output = self.output_layouts
        is_output_supported = output == Replicate() or _is_shard(output)
        reason = _layer_obstacle(
            module, self.use_local_output and self.input_layouts == Shard(-1) and is_output_supported
        )
        super().install_forward(module, mesh)
        return _with_forward(module, (self, mesh), reason)


def _with_forward(module: nn.Module, style: tuple[Any, Any], reason: str) -> nn.Module:
    """Give a layer overweave's forward, unless there is a reason against it, which is counted.

    The forward is a bound method, so that a deep copy of the layer computes with the copy's weights.
    """
    if reason:
        site(type(style[0]).__name__ + SITES).by_torch[reason] += 1
        return module
    module.overweave_style = style  # type: ignore[assignment]
    module.forward = MethodType(_forward, module)
    return module


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's columns (Colwise) or the sum over ranks (Rowwise); by Transformers if it is unsupported."""
    style, weight, bias = module.overweave_style[0], module.weight, module.bias
    counts, reason = site(type(style).__name__ + SITES), _call_obstacle(x, weight)
    if reason:
        counts.by_torch[reason] += 1
        return _stock_forward(module, x)
    counts.by_overweave += 1
    if isinstance(style, Colwise):
        return replicated_linear(x, local(weight), local(bias), weight.device_mesh)
    if _is_shard(style.output_layouts):
        return linear_reduce_scatter(x, weight, bias, dim=style.output_layouts.dim)
    y: torch.Tensor = linear_all_reduce(x, weight, bias)
    return y


def _stock_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Run Transformers' tensor-parallel forward: a copy of it, since Transformers' is a closure over one layer, which
    would compute with the original's weights after a deep copy. SOURCE: TensorParallelLayer.install_forward."""
    style, mesh = module.overweave_style
    arguments, options = style.transform_inputs_pre_forward(module, (x,), {}, mesh)
    with style.context_around_forward(module, mesh):
        y = type(module).forward(module, *arguments, **options)
    result: torch.Tensor = style.transform_output_post_forward(module, y, mesh)
    return result


def register() -> None:
    """Replace Transformers' styles `colwise` and `rowwise` for models that are loaded afterwards.

    Also register `experts_implementation="overweave"`, with which a model is loaded to have overweave's experts.

    Raises InputError if they were replaced before.
    """
    for name, style in (("colwise", Colwise), ("rowwise", Rowwise)):
        if isinstance(ALL_PARALLEL_STYLES[name], style):
            raise InputError("register with Transformers", f"its style {name!r} is overweave's", "Call it once")
    ALL_PARALLEL_STYLES.register("colwise", Colwise())
    ALL_PARALLEL_STYLES.register("rowwise", Rowwise())
    register_experts()


def unregister() -> None:
    """Restore Transformers' styles; models that are loaded keep overweave's."""
    ALL_PARALLEL_STYLES.register("colwise", stock.ColwiseParallel())
    ALL_PARALLEL_STYLES.register("rowwise", stock.RowwiseParallel())


def _layer_obstacle(module: nn.Module, is_supported: bool) -> str:
    """Return why a layer keeps Transformers' forward; empty if it gets overweave's."""
    kind = type(module)
    if not isinstance(module, nn.Linear) or getattr(module, "_hf_quantized_needs_local_tp", False):
        return f"a layer that is a {kind.__name__}, or quantized"
    if kind.forward is not nn.Linear.forward or "forward" in vars(module):
        return f"a layer that is a {kind.__name__}, whose forward is its own"
    return "" if is_supported else "a layer with layouts that no operator of overweave has"


def _call_obstacle(x: object, weight: Any) -> str:
    """Return why Transformers computes a call; empty if overweave does."""
    if torch.compiler.is_compiling():
        return "a compiler reads it"
    if isinstance(x, DTensor) or not isinstance(weight, DTensor):
        return "its input is a DTensor, or its weight is not"
    if weight.device_mesh.ndim != 1 or weight.shape[weight.placements[0].dim] % weight.device_mesh.size():  # type: ignore[attr-defined]
        return "its mesh has several dimensions, or ranks do not divide its width"
    return obstacle_of(weight)


def _is_shard(placement: Any) -> bool:
    return isinstance(placement, Shard) and placement.dim >= 0
