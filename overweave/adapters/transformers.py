"""Transformers' tensor parallelism with overlapped collectives: `register()`, before a model is loaded.

    from overweave.adapters import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=8))

The styles `colwise` and `rowwise` of Transformers, which the plans of its models name, are replaced under these names:
PEFT knows no others. Weights stay the DTensors that Transformers makes of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from overweave.adapters.versions import names_of
from overweave.errors import InputError
from overweave.functional import linear_all_reduce, linear_reduce_scatter
from overweave.layers.linear import local
from overweave.layers.replicated import replicated_linear

with names_of("transformers"):
    from transformers.distributed import tensor_parallel as stock
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES  # it lives elsewhere from 5.22


class Colwise(stock.ColwiseParallel):  # type: ignore[misc]  # transformers has no types
    """Each rank computes its columns; the gradient of the input is summed over ranks while it is computed."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Replaces the forward of a linear layer whose columns stay apart. Any other is Transformers' own."""
        super().install_forward(module, mesh)
        if not (_is_plain(module) and self.use_local_output and self.output_layouts == Shard(-1)):
            return module
        theirs = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight: Any = module.weight
            bias: Any = module.bias
            if _is_theirs(x, weight) or self.input_layouts != Replicate():
                result: torch.Tensor = theirs(x)
                return result
            return replicated_linear(x, local(weight), local(bias), weight.device_mesh)

        module.forward = forward
        return module


class Rowwise(stock.RowwiseParallel):  # type: ignore[misc]
    """Each rank multiplies its columns of the input; the products are summed over ranks while they are computed."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Replaces the forward of a linear layer. A quantized one is Transformers' own."""
        super().install_forward(module, mesh)
        made = self.output_layouts
        if not (_is_plain(module) and self.use_local_output and self.input_layouts == Shard(-1)):
            return module
        theirs = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight: Any = module.weight
            bias: Any = module.bias
            if _is_theirs(x, weight) or not (made == Replicate() or _is_of_rows(made)):
                result: torch.Tensor = theirs(x)
                return result
            if _is_of_rows(made):
                return linear_reduce_scatter(x, weight, bias, dim=made.dim)
            y: torch.Tensor = linear_all_reduce(x, weight, bias)
            return y

        module.forward = forward
        return module


def register() -> None:
    """Replaces Transformers' styles `colwise` and `rowwise`; models that are loaded afterwards have overweave's.

    Raises InputError where they were replaced before.
    """
    for name, style in (("colwise", Colwise), ("rowwise", Rowwise)):
        if isinstance(ALL_PARALLEL_STYLES[name], style):
            raise InputError("register with Transformers", f"its style {name!r} is overweave's", "Call it once")
    ALL_PARALLEL_STYLES.register("colwise", Colwise())
    ALL_PARALLEL_STYLES.register("rowwise", Rowwise())


def unregister() -> None:
    """Gives Transformers' styles their names back; models that are loaded keep theirs."""
    ALL_PARALLEL_STYLES.register("colwise", stock.ColwiseParallel())
    ALL_PARALLEL_STYLES.register("rowwise", stock.RowwiseParallel())


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not getattr(module, "_hf_quantized_needs_local_tp", False)


def _is_theirs(x: object, weight: object) -> bool:
    """Whether a call is computed in DTensors: of one, in a mesh of several dimensions, or where a compiler reads."""
    if isinstance(x, DTensor) or not isinstance(weight, DTensor) or torch.compiler.is_compiling():
        return True
    width = weight.shape[weight.placements[0].dim]  # type: ignore[attr-defined]
    return weight.device_mesh.ndim != 1 or width % weight.device_mesh.size() > 0


def _is_of_rows(placement: Any) -> bool:
    return isinstance(placement, Shard) and placement.dim >= 0
