"""Megatron-core's parallel linear layers with overlapped collectives: subclasses that a layer spec names.

    from overweave.adapters import megatron
    spec = megatron.woven(get_gpt_layer_local_spec())
    model = GPTModel(config, transformer_layer_spec=spec, ...)

Weights, initialization, distributed checkpoints and the accumulation of gradients into `main_grad` are Megatron's.
Layers whose weights are also sharded over other groups and gathered for each matmul (`gtp_remat`, from 0.19) run
Megatron's forward. MoE layers whose dispatcher is `alltoall` send a token once to each rank, however many of its
experts are there (megatron_experts.py).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from overweave.adapters.megatron_experts import MoELayer, TokenDispatcher
from overweave.adapters.packages import names_of, obstacle_of
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from overweave.layers.replicated import replicated_linear

with names_of("megatron"):
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import layers as stock
    from megatron.core.transformer.moe import moe_layer

__all__ = ["ColumnParallelLinear", "MoELayer", "RowParallelLinear", "SpecProvider", "TokenDispatcher", "woven"]


class ColumnParallelLinear(stock.ColumnParallelLinear):  # type: ignore[misc]  # Megatron is not installed with it
    """With sequence parallelism the all-gather of x overlaps with the matmul, forward and in the weight's gradient."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Return the product; by Megatron if that defers the weight's gradient, gathers the weight or quantizes it."""
        bias, group = options.get("bias"), options.get("tp_group")
        is_fused = bool(options.get("gradient_accumulation_fusion")) and weight.requires_grad
        is_unsupported = options.get("grad_output_buffer") is not None or options.get("gtp_remat_size", 1) > 1
        if arguments or is_unsupported or obstacle_of(weight):
            return super()._forward_impl(input, weight, *arguments, **options)
        if options.get("sequence_parallel"):
            return all_gather_linear(input, weight, bias, group, dim=0, save="columns", main_grad=is_fused)
        if options.get("allreduce_dgrad") and not is_fused:
            return replicated_linear(input, weight, bias, group)
        return super()._forward_impl(input, weight, **options)


class RowParallelLinear(stock.RowParallelLinear):  # type: ignore[misc]
    """The sum over ranks overlaps with the matmul: a reduce-scatter with sequence parallelism, else an
    all-reduce."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (sum over ranks, the bias if skip_bias_add leaves it to another layer), as Megatron's forward does."""
        is_gathered = getattr(self, "gtp_remat_size", 1) > 1
        is_offloaded = self.config._cpu_offloading_context is not None
        is_unsupported = self.explicit_expert_comm or not self.input_is_parallel
        if is_unsupported or is_offloaded or is_gathered or obstacle_of(self.weight):
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(input_)
            return result
        is_fused = bool(self.gradient_accumulation_fusion) and self.weight.requires_grad
        if self.sequence_parallel:
            y = linear_reduce_scatter(input_, self.weight, group=self.tp_group, dim=0, main_grad=is_fused)
        else:
            y = linear_all_reduce(input_, self.weight, group=self.tp_group, main_grad=is_fused)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


class SpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's local backend with overweave's linear layers, for specs that are built from a provider."""

    def column_parallel_linear(self) -> type:
        """Return the class of column-parallel layers."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Return the class of row-parallel layers."""
        return RowParallelLinear


_REPLACEMENTS = {
    stock.ColumnParallelLinear: ColumnParallelLinear,
    stock.RowParallelLinear: RowParallelLinear,
    moe_layer.MoELayer: MoELayer,
}


def woven(spec: Any) -> Any:
    """Replace the linear and MoE layers in a Megatron layer spec, such as `get_gpt_layer_local_spec()`, recursively."""
    if isinstance(spec, type):
        return _REPLACEMENTS.get(spec, spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)(woven(each) for each in spec)
    if isinstance(spec, partial):  # a module builder, from 0.17
        options = {name: woven(each) for name, each in spec.keywords.items()}
        return partial(woven(spec.func), *woven(spec.args), **options)
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    return replace(spec, **{field.name: woven(getattr(spec, field.name)) for field in fields(spec) if field.init})
