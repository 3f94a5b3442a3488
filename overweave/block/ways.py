"""The ways to compute a block, and each of them on this rank's part: eager or compiled, by torch or by overweave."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from overweave.adapters.inductor.fusion import FuseCollectives
from overweave.block.cases import CONTEXT, BlockCase
from overweave.block.llama import Cache, TransformerBlock, styles
from overweave.compat.torch_names import CustomGraphPass, compile_fx, symmetric_memory
from overweave.errors import InputError
from overweave.memory.group import Group
from overweave.tuner.measure.baselines import OURS, SEQUENTIAL, TORCH_FUSED
from overweave.tuner.measure.replay import MOST_INPUT_SETS
from overweave.tuner.measure.trial import CallResult


class BlockWay(NamedTuple):
    """A row of the comparison. graph: who fuses collectives in the compiled graph; None: nothing is compiled."""

    name: str
    label: str
    by_overweave: bool = False
    graph: Literal["nobody", "torch", "overweave"] | None = None


WAYS = (
    BlockWay(SEQUENTIAL, "torch's styles"),
    BlockWay("compiled", "torch's styles, compiled", graph="nobody"),
    BlockWay(TORCH_FUSED, "torch's pass, compiled", graph="torch"),
    BlockWay(OURS, "overweave's styles", by_overweave=True),
    BlockWay("installed", "overweave's pass, compiled", graph="overweave"),
)


class Counted(CustomGraphPass):  # type: ignore[misc]
    """Counts collectives of compiled graphs that were fused, and those that were left. before: the pass that fuses."""

    def __init__(self, before: FuseCollectives | None = None) -> None:
        self.before, self.found, self.left = before, 0, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        self.found += sum(name.startswith(("symm_mem.fused", "overweave.")) for name in names)
        self.left += sum(name.startswith("_c10d_functional.") and "wait" not in name for name in names)

    def uuid(self) -> Any:
        """None: a graph from a cache would not be counted."""
        return None

    def __str__(self) -> str:
        return f"{self.found} of {self.found + self.left} fused"


class BlockSetup:
    """One case on this rank: the same weights and inputs for every way."""

    def __init__(self, case: BlockCase, group: Group, place: tuple[torch.device, torch.dtype]) -> None:
        self.case, self.group, (self.device, self.dtype) = case, group, place
        self.mesh = DeviceMesh.from_group(group.process_group, self.device.type)
        self.is_split = case.work != "decoding"
        generator = torch.Generator(self.device).manual_seed(group.rank if self.is_split else 0)
        sizes, length = case.sizes, case.length // (group.world_size if self.is_split else 1)
        shape = (case.sequences, length, sizes.width)
        self.inputs = [self._random(shape, generator) for _ in range(MOST_INPUT_SETS)]
        self.gradient = self._random(shape, generator)
        self.cache: Cache | None = None
        if not self.is_split:
            kept = (case.sequences, sizes.kv_heads // group.world_size, CONTEXT, sizes.head)
            position = torch.full((1,), CONTEXT - 1, dtype=torch.int64, device=self.device)
            self.cache = Cache(self._random(kept, generator), self._random(kept, generator), position)

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    def block(self, by_overweave: bool) -> nn.Module:
        """The block, whose weights are the same on every rank before they are split."""
        torch.manual_seed(0)
        with self.device:
            made = TransformerBlock(self.case.sizes).to(self.dtype)
        return parallelize_module(made, self.mesh, styles(self.is_split, by_overweave))

    def way(self, way: BlockWay) -> tuple[Callable[[int], CallResult], Counted]:
        """What is timed, and what is counted of its graphs once it has run. A sample's number names the input."""
        counted = Counted(FuseCollectives() if way.graph == "overweave" else None)
        block: Callable[..., torch.Tensor] = self.block(way.by_overweave)
        parameters = list(block.parameters()) if isinstance(block, nn.Module) else []
        if way.graph is not None:
            patches = {"_micro_pipeline_tp": way.graph == "torch", "post_grad_custom_post_pass": counted}
            block = torch.compile(block, backend=partial(_compiled, patches), dynamic=False)
        run = partial(self._trained, block, parameters) if self.case.work == "training" else partial(self._run, block)
        return self._as(way, run, counted), counted

    def _as(self, way: BlockWay, run: Callable[[int], CallResult], counted: Counted) -> Callable[[int], CallResult]:
        """The first call compiles. Raises InputError there where torch's pass fuses nothing: that is no row of it."""
        seen: list[bool] = []

        def call(turn: int) -> CallResult:
            if way.graph != "torch" or seen:
                return run(turn)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch has deprecated what its own pass asks for
                symmetric_memory.enable_symm_mem_for_group(self.group.name)
            result = run(turn)
            if not counted.found:
                raise InputError(way.label, f"its pass fuses none of {counted.left} collectives", "Time the others")
            seen.append(True)
            return result

        return call

    def _run(self, block: Callable[..., torch.Tensor], turn: int) -> CallResult:
        with torch.no_grad():
            return block(self.inputs[turn % MOST_INPUT_SETS], self.cache)

    def _trained(self, block: Callable[..., torch.Tensor], parameters: list[nn.Parameter], turn: int) -> CallResult:
        """Forward and backward, the gradients of weights made anew: what comes out, and the gradient of the input."""
        for parameter in parameters:
            parameter.grad = None
        x = self.inputs[turn % MOST_INPUT_SETS].detach().requires_grad_()
        y = block(x)
        y.backward(self.gradient)
        assert x.grad is not None
        return y.detach(), x.grad


def _compiled(patches: dict[str, Any], module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Inductor with a configuration of its own: Dynamo keeps graphs by the backend, which is another for each way."""
    return compile_fx(module, inputs, config_patches=patches)
