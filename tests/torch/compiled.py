"""torch.compile with Inductor's passes over graphs and without its code generation: graphs run operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V


def backend(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A backend that keeps the graphs that it has compiled."""

    def compiled(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        view_to_reshape(module)  # as Inductor does, and torch's pass over tensor parallelism expects
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            post_grad_passes(module, is_inference=False)
        module.graph.lint()
        module.recompile()
        graphs.append(module)
        return module.forward

    return aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


def collectives(graphs: list[torch.fx.GraphModule]) -> list[str]:
    """Collectives of torch's that are left in graphs."""
    return [
        str(node.target) for graph in graphs for node in graph.graph.nodes if "_c10d_functional" in str(node.target)
    ]


def woven(graphs: list[torch.fx.GraphModule]) -> list[str]:
    """Operators of overweave's in graphs, by name."""
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return [call.split(".")[1] for call in calls if call.startswith("overweave.")]
