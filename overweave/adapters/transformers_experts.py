"""MoE layers of Transformers by overweave; `register()` of overweave.adapters.transformers registers both names.

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="overweave")
    DistributedConfig(tp_size=8, ep_size=8, ep_implementation="overweave")

The first computes each layer's experts by a grouped matmul, without a host synchronisation, in any parallel plan of
Transformers; the second sends a token once to each rank, however many of its experts are there.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave import moe
from overweave.adapters.packages import names_of
from overweave.adapters.report import site

with names_of("transformers"):
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe as stock

try:
    from transformers.distributed import expert_parallel  # newer versions have it
except ImportError:
    expert_parallel = None

NAME, EXPERTS = "overweave", "experts of Transformers"
_SWIGLU = moe.Glu()


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of a layer, as Transformers' grouped_mm does; ids >= num_experts are padding, and skipped.

    hidden_states: `[t, hidden]`. top_k_index, top_k_weights: `[t, top]`. Returns `[t, hidden]`. Unsupported layers are
    computed by Transformers.
    """
    counts = site(EXPERTS)
    if reason := _obstacle(module):
        counts.by_torch[reason] += 1
        stock_result: torch.Tensor = stock.grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return stock_result
    if not torch.compiler.is_compiling():
        counts.by_overweave += 1
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, up_bias = _weight(module, name), getattr(module, f"{name}_bias", None)
    down, down_bias = _weight(module, "down_proj"), getattr(module, "down_proj_bias", None)
    ids = torch.where(top_k_index < module.num_experts, top_k_index, -1)
    glu = _SWIGLU if _is_swiglu(module) else None
    h, routed = moe.experts_matmul(hidden_states.to(up.dtype), ids, up, bias=up_bias, glu=glu)
    if glu is None:
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = moe.experts_sum(h, routed, top_k_weights, down, bias=down_bias)
    return y.to(hidden_states.dtype)


def _weight(module: Any, name: str) -> torch.Tensor:
    """Return a weight as `[experts, n, k]`; a model may store it transposed."""
    weight: torch.Tensor = getattr(module, name)
    return weight.transpose(1, 2) if module.is_transposed else weight


def _is_swiglu(module: Any) -> bool:
    """Whether a layer's gate is `silu(gate) * up` of the two halves of gate_up, which the matmul's epilogue applies."""
    apply = getattr(type(module), "_apply_gate", None)
    is_default = module.has_gate and apply is stock._default_apply_gate and getattr(module, "is_concatenated", True)
    return is_default and isinstance(module.act_fn, torch.nn.SiLU | SiLUActivation)


def _obstacle(module: Any) -> str:
    """Return why Transformers computes a layer; empty if overweave does."""
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    up = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    if up is None or up.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "its weights are quantized, or not there"
    return ""


def expert_parallel_of(base: Any) -> Any:
    """Return the expert-parallel implementation, a subclass of Transformers' AllToAllEP, which is `base`."""

    class OverweaveEP(base):  # type: ignore[misc]
        """Sends tokens by `overweave.moe.dispatch`, and the sums of their experts back by `combine`."""

        def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            """Send tokens to their experts' ranks, compute, and return the weighted sums `[tokens, hidden]`."""
            counts = site("expert parallelism of Transformers")
            if self.tp_mesh.size() > 1:  # ranks share a batch, which Transformers slices
                counts.by_torch["ranks of a tensor-parallel group share a batch"] += 1
                return super().__call__(hidden_states, top_k_index, top_k_weights)
            counts.by_overweave += 1
            experts = self.num_local_experts * self.ep_mesh.size()
            dispatched = moe.dispatch(hidden_states, top_k_index, top_k_weights, experts, self.ep_mesh.get_group())
            ids = torch.where(dispatched.topk_ids < 0, self.num_local_experts, dispatched.topk_ids).long()
            weights = dispatched.topk_weights.to(top_k_weights.dtype)  # type: ignore[union-attr]
            parts = self.experts_forward(dispatched.x, ids, weights) if len(dispatched.x) else dispatched.x
            return moe.combine(parts, dispatched)

    return OverweaveEP


def register_experts() -> None:
    """Register both implementations by name; models that name neither do not change."""
    stock.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if expert_parallel is not None and hasattr(expert_parallel, "EPImplementationInterface"):
        expert_parallel.EPImplementationInterface.register(NAME, expert_parallel_of(expert_parallel.AllToAllEP))
