"""What is left, and what is ours, in graphs that torch.compile has made."""

from __future__ import annotations

import torch


def collectives(graphs: list[torch.fx.GraphModule]) -> list[str]:
    """Collectives of torch's that are left in graphs."""
    return [
        str(node.target) for graph in graphs for node in graph.graph.nodes if "_c10d_functional" in str(node.target)
    ]


def woven(graphs: list[torch.fx.GraphModule]) -> list[str]:
    """Operators of overweave's in graphs, by name."""
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    ours = [call.split(".")[1] for call in calls if call.startswith(("overweave.", "overweave_graphs."))]
    return [name for name in ours if name != "beside"]
