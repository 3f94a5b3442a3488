"""The ways to compute a block, and each of them on this rank's part: eager or compiled, by torch or by overweave."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from overweave.adapters.inductor.agreed import COMPARE, NAMESPACE
from overweave.adapters.inductor.fusion import FuseCollectives
from overweave.block.cases import CONTEXT, BlockCase
from overweave.block.llama import Cache, TransformerBlock, styles
from overweave.compat.torch_names import CustomGraphPass, compile_fx, reset, symmetric_memory
from overweave.errors import InputError
from overweave.memory.group import Group
from overweave.tuner.measure.baselines import OURS, SEQUENTIAL, TORCH_FUSED
from overweave.tuner.measure.bench import BenchRequest, BenchRun, CaseRows, device_count, new_run, rank_device, row_of
from overweave.tuner.measure.timer import MOST_INPUT_SETS, is_replayed, with_graph_warmup
from overweave.tuner.measure.trial import CallResult, TimedTrial
from overweave.tuner.space.shapes import DTYPES


class BlockWay(NamedTuple):
    """A row of the comparison. graph: which pass fuses collectives in the compiled graph; None: not compiled."""

    name: str
    label: str
    by_overweave: bool = False
    graph: Literal["unfused", "torch", "overweave"] | None = None


WAYS = (
    BlockWay(SEQUENTIAL, "torch's styles"),
    BlockWay("compiled", "torch's styles, compiled", graph="unfused"),
    BlockWay(TORCH_FUSED, "torch's pass, compiled", graph="torch"),
    BlockWay(OURS, "overweave's styles", by_overweave=True),
    BlockWay("installed", "overweave's pass, compiled", graph="overweave"),
)


class Counted(CustomGraphPass):  # type: ignore[misc]
    """Counts collectives of compiled graphs that were fused, and those that were not. before: the pass that fuses."""

    def __init__(self, before: FuseCollectives | None = None) -> None:
        self.before, self.fused, self.unfused = before, 0, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Run the fusing pass, if any, and count collectives."""
        if self.before is not None:
            self.before(graph)
        names = [str(node.target) for node in graph.nodes if node.op == "call_function" and node.target is not COMPARE]
        self.fused += sum(name.startswith(("symm_mem.fused", f"{NAMESPACE}.")) for name in names)
        self.unfused += sum(name.startswith("_c10d_functional.") and "wait" not in name for name in names)

    def uuid(self) -> Any:
        """Return None: a graph from a cache would not be counted."""
        return None

    def __str__(self) -> str:
        return f"{self.fused} of {self.fused + self.unfused} fused"


class BlockSetup:
    """The weights and inputs of one case on this rank, the same for every way."""

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
            cache_shape = (case.sequences, sizes.kv_heads // group.world_size, CONTEXT, sizes.head)
            position = torch.full((1,), CONTEXT - 1, dtype=torch.int64, device=self.device)
            self.cache = Cache(self._random(cache_shape, generator), self._random(cache_shape, generator), position)

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    def block(self, by_overweave: bool) -> nn.Module:
        """Return the parallelized block; its weights are the same on every rank before they are sharded."""
        torch.manual_seed(0)
        with self.device:
            block = TransformerBlock(self.case.sizes).to(self.dtype)
        return parallelize_module(block, self.mesh, styles(self.is_split, by_overweave))

    def timed_call(self, way: BlockWay) -> tuple[Callable[[int], CallResult], Counted]:
        """Return the call that is timed, and the counter of its graphs. The call's argument, the sample, selects the
        input."""
        counted = Counted(FuseCollectives() if way.graph == "overweave" else None)
        block: Callable[..., torch.Tensor] = self.block(way.by_overweave)
        parameters = list(block.parameters()) if isinstance(block, nn.Module) else []
        if way.graph is not None:
            patches = {"_micro_pipeline_tp": way.graph == "torch", "post_grad_custom_post_pass": counted}
            block = torch.compile(block, backend=partial(_compiled, patches), dynamic=False)
        run = (
            partial(self._train_step, block, parameters) if self.case.work == "training" else partial(self._run, block)
        )
        return self._with_fusion_check(way, run, counted), counted

    def _with_fusion_check(
        self, way: BlockWay, run: Callable[[int], CallResult], counted: Counted
    ) -> Callable[[int], CallResult]:
        """Return the call, which raises InputError at its first run (the one that compiles) if torch's pass fuses
        nothing."""
        checked: list[bool] = []

        def call(sample: int) -> CallResult:
            if way.graph != "torch" or checked:
                return run(sample)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch has deprecated what its own pass asks for
                symmetric_memory.enable_symm_mem_for_group(self.group.name)
            result = run(sample)
            if not counted.fused:
                raise InputError(way.label, f"its pass fuses none of {counted.unfused} collectives", "Time the others")
            checked.append(True)
            return result

        return call

    def _run(self, block: Callable[..., torch.Tensor], sample: int) -> CallResult:
        with torch.no_grad():
            return block(self.inputs[sample % MOST_INPUT_SETS], self.cache)

    def _train_step(
        self, block: Callable[..., torch.Tensor], parameters: list[nn.Parameter], sample: int
    ) -> CallResult:
        """Run forward and backward with new gradients of weights, and return the result and the gradient of the
        input."""
        for parameter in parameters:
            parameter.grad = None
        x = self.inputs[sample % MOST_INPUT_SETS].detach().requires_grad_()
        y = block(x)
        y.backward(self.gradient)
        assert x.grad is not None
        return y.detach(), x.grad


def _compiled(patches: dict[str, Any], module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Compile with Inductor and a configuration of its own. Dynamo keys graphs by backend, and each way has another
    one."""
    return compile_fx(module, inputs, config_patches=patches)


def block_runs(
    cases: tuple[BlockCase, ...],
    request: BenchRequest,
    group: Group,
    on_progress: Callable[[str, float], None] | None = None,
) -> Iterator[BenchRun]:
    """Compare the ways, and yield the run so far after each case. Collective. request: device and dtype. on_progress:
    called with the case and the fraction of it that is done."""
    so_far = new_run(request, group)
    for case in cases:
        on_round = partial(on_progress, case.name) if on_progress is not None else None
        so_far = replace(so_far, cases=(*so_far.cases, _rows_of(case, request, group, on_round)))
        yield so_far


def _rows_of(
    case: BlockCase, request: BenchRequest, group: Group, on_round: Callable[[float], None] | None = None
) -> CaseRows:
    """Time all ways on one case; each result must agree with the first way's. Decoding is timed as captured graphs, if
    the backend is NCCL."""
    reset()
    device = rank_device(request.device)
    blocks = BlockSetup(case, group, (device, getattr(torch, DTYPES[request.dtype])))
    calls = {way.name: blocks.timed_call(way) for way in WAYS}
    is_shared = group.world_size > device_count()  # then the backend is gloo, which cannot be captured
    as_graphs = case.work == "decoding" and is_replayed(device, case.tokens) and not is_shared
    trial = TimedTrial(blocks, with_graph_warmup(request.effort, device), as_graphs=as_graphs)
    samples = trial.times({name: call for name, (call, _) in calls.items()}, on_round=on_round)
    rows = tuple(
        row_of((way.name, way.label), samples, "" if way.graph is None else str(calls[way.name][1]))
        for way in WAYS
        if way.name not in trial.left_out and WAYS[0].name not in trial.left_out  # the baseline of the others
    )
    return CaseRows(case=case.matmul, methods=rows, left_out=trial.left_out, is_replayed=as_graphs)
