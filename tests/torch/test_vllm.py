"""vLLM's row-parallel layer on CPU ranks, answered by overweave (`make adapters-test`)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from overweave.errors import InputError
from tests.ranks import run_ranks
from tests.source_tree import ROOT

pytest.importorskip("vllm")
from vllm import plugins
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import RowParallelLinear

from overweave.adapters import vllm as adapter
from overweave.functional import linear_all_reduce

pytestmark = pytest.mark.adapters
ROWS, K, N, MOST_OFF = 6, 16, 12, 1e-6


def off(options: dict[str, Any]) -> tuple[float, int]:
    """For `run_ranks`: how far a layer is from the whole one, and how often overweave answered."""
    with patch.object(adapter, "linear_all_reduce", wraps=linear_all_reduce) as answers:
        return _distance(options, lambda layer: layer), answers.call_count


def _distance(options: dict[str, Any], prepared: Callable[[RowParallelLinear], Any]) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(ranks, backend="gloo")
        adapter.register()
        try:
            layer = RowParallelLinear(K, N, params_dtype=torch.float32, **options)
            torch.manual_seed(0)
            weight, bias, x = torch.randn(N, K), torch.randn(N), torch.randn(ROWS, K)
            layer.weight.weight_loader(layer.weight, weight)
            layer.bias.data.copy_(bias)
            own = x.chunk(ranks, -1)[rank].contiguous() if layer.input_is_parallel else x
            with torch.inference_mode():
                y = prepared(layer)(own)
        finally:
            adapter.unregister()
            parallel_state.destroy_model_parallel()
    if isinstance(y, tuple):
        y = y[0] if y[1] is None else y[0] + y[1]
    whole = x @ weight.t() + bias
    return ((y - whole).abs().max() / whole.abs().max()).item()


@pytest.mark.parametrize(
    ("options", "calls"),
    [({}, 1), ({"skip_bias_add": True}, 1), ({"return_bias": False}, 1), ({"input_is_parallel": False}, 0)],
    ids=str,
)
def test_a_layer_computes_what_the_whole_one_does(options: dict[str, Any], calls: int):
    for distance, answered in run_ranks(off, 2, options):
        assert distance <= MOST_OFF
        assert answered == calls


def compiled() -> tuple[float, list[str]]:
    """For `run_ranks`: a layer in one graph, as vLLM compiles it, and overweave's ops in that graph."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    distance = _distance({}, lambda layer: torch.compile(layer, fullgraph=True, backend=backend))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    return distance, [target for target in targets if target.startswith("overweave")]


def test_a_compiled_layer_is_one_op_in_one_graph():
    for distance, ops in run_ranks(compiled, 2, timeout_s=120):
        assert distance <= MOST_OFF
        assert ops == ["overweave.matmul_all_reduce.default"]


def test_the_entry_point_registers_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = groups[plugins.DEFAULT_PLUGINS_GROUP]["overweave"].partition(":")
    plugin, original = getattr(import_module(module), name), RowParallelLinear.forward
    monkeypatch.delenv("OVERWEAVE_INSTALL", raising=False)
    plugin()
    assert RowParallelLinear.forward is original
    command = (ROOT / "examples" / "torch" / "with_vllm.sh").read_text()  # as the documentation shows it
    monkeypatch.setenv(*command.split()[0].split("="))
    plugin()
    plugin()
    try:
        assert RowParallelLinear.forward is not original
        with pytest.raises(InputError, match="once"):
            adapter.register()
    finally:
        adapter.unregister()
    assert RowParallelLinear.forward is original
