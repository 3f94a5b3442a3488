"""Megatron-core's parallel linear layers with overlapped collectives, in place of its own and of user buffers.

    from overweave.adapters import megatron
    spec = megatron.woven(get_gpt_layer_local_spec())
    model = GPTModel(config, transformer_layer_spec=spec, ...)

Weights, initialization, distributed checkpoints and the accumulation of gradients into `main_grad` are Megatron's. So
are weights that are sharded over other groups as well (`gtp_remat`, from 0.19), and gathered for each matmul. Layers of
experts whose dispatcher is `alltoall` send a token once to each rank, however many of its experts live there
(megatron_experts.py).
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
    """With sequence parallelism rows are gathered while they are multiplied, forward and in the weight's gradient."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Return the product; by Megatron if it defers the weight's gradient or gathers the weight."""
        bias, group = options.get("bias"), options.get("tp_group")
        is_fused = bool(options.get("gradient_accumulation_fusion")) and weight.requires_grad
        is_other = options.get("grad_output_buffer") is not None or options.get("gtp_remat_size", 1) > 1
        if arguments or is_other or obstacle_of(weight):
            return super()._forward_impl(input, weight, *arguments, **options)
        if options.get("sequence_parallel"):
            return all_gather_linear(input, weight, bias, group, dim=0, save="columns", main_grad=is_fused)
        if options.get("allreduce_dgrad") and not is_fused:
            return replicated_linear(input, weight, bias, group)
        return super()._forward_impl(input, weight, **options)


class RowParallelLinear(stock.RowParallelLinear):  # type: ignore[misc]
    """Products are summed over ranks while they are computed: a reduce-scatter with sequence parallelism, else an
    all-reduce."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what Megatron's forward does: the sum, and the bias if another layer adds it."""
        is_gathered = getattr(self, "gtp_remat_size", 1) > 1
        is_offloaded = self.config._cpu_offloading_context is not None
        is_other = self.explicit_expert_comm or not self.input_is_parallel
        if is_other or is_offloaded or is_gathered or obstacle_of(self.weight):
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
    """Megatron's local backend with overweave's linear layers, where a spec is built from a provider."""

    def column_parallel_linear(self) -> type:
        """A column-parallel layer."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """A row-parallel layer."""
        return RowParallelLinear


_WOVEN = {
    stock.ColumnParallelLinear: ColumnParallelLinear,
    stock.RowParallelLinear: RowParallelLinear,
    moe_layer.MoELayer: MoELayer,
}


def woven(spec: Any) -> Any:
    """Return a layer spec of Megatron's, such as `get_gpt_layer_local_spec()`, with overweave's layers."""
    if isinstance(spec, type):
        return _WOVEN.get(spec, spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)(woven(each) for each in spec)
    if isinstance(spec, partial):  # what builds a module, from 0.17
        options = {name: woven(each) for name, each in spec.keywords.items()}
        return partial(woven(spec.func), *woven(spec.args), **options)
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    return replace(spec, **{field.name: woven(getattr(spec, field.name)) for field in fields(spec) if field.init})
