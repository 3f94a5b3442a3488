"""The cells of the table: a module, a way to cut it, a circumstance; gradients against those of one process.

    python -m tests.torch.situations

runs all of them and prints how many there are, what is wrong, and which fell back to torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._functorch import config as autograd_config
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh

import overweave as ow
from overweave.adapters import report
from tests.ranks import run_ranks
from tests.torch.situations.circumstances import CIRCUMSTANCES, Case, Circumstance
from tests.torch.situations.models import MODELS, OUTSIDE, WIDTH, Situated
from tests.torch.situations.ways import WAYS, Way, cut_model, torchs, whole_gradient

READ_WHOLE = (
    "router",
    "normed",
    "subclassed",
    *OUTSIDE,
)  # of which a plan leaves something to torch whatever the circumstance
RANKS = 2
COARSE = 0.15  # relative to the largest element, of layers in fp8, of which ranks may scale their parts by themselves
MOST_CELLS = 400  # of one run of ranks


class Cell(NamedTuple):
    model: str
    way: str
    circumstance: str

    def __str__(self) -> str:
        return " / ".join(self)


# Cells that there are not, by patterns of their names, and why.
EXCLUDED = {
    "[sf]* / Transformers, whole / a deep copy": "Transformers' forward keeps to the layer that was copied",
    "normed / * / selective checkpoint*of all": "torch's norm writes in place: one process raises, too",
    "fp8 of torchao / *styles, * / no gradient before": "torch's styles raise, too: an inference tensor has no version",
    "* / install compiled, * / selective checkpoint inside of all": "torch raises, too, without the pass",
    "* / functional, * / fp64": "functions refuse the dtype by name",
    "* / layers, * / fp64": "layers refuse the dtype by name",
    "attention / * / a gradient penalty": "torch differentiates its attention once on a CPU",
    "* / install*, * / a gradient penalty": "torch's fused operators and compiled graphs are differentiated once",
    "[sfL][uP8]* / styles, * / a gradient penalty": "torch's style has the layer, and loses such gradients",
    "subclassed / [!st]*, * / parametrized weights that step": "the layer stands within another, which has no weight",
}


def excluded(cell: Cell) -> str:
    """Why a cell is not there; empty if it is."""
    return next((why for pattern, why in EXCLUDED.items() if fnmatch(str(cell), pattern)), "")


class Verdict(NamedTuple):
    """wrong: empty if all is right. left: what was torch's, by site and reason."""

    cell: Cell
    wrong: str
    left: tuple[str, ...]


def cells(
    way_name: str, circumstances: Iterable[str] = CIRCUMSTANCES, models: Iterable[str] = MODELS
) -> Iterator[Cell]:
    """Of a way, those that there are."""
    way = WAYS[way_name]
    for model in models:
        for name in circumstances:
            known = CIRCUMSTANCES[name]
            cell = Cell(model, way_name, name)
            is_other = (known.plans_only and not way.is_plan) or (known.torch_fails and way.is_torchs)
            if way.takes(model) and not is_other and not excluded(cell):
                yield cell


def judged(asked: list[Cell]) -> list[Verdict]:
    """The verdicts of all ranks. A busy machine may keep a rank from its peers for long, which is no cell's fault."""
    found = []
    for first in range(0, len(asked), MOST_CELLS):
        part = asked[first : first + MOST_CELLS]
        answers = run_ranks(verdicts, RANKS, part, timeout_s=500.0, group_timeout_s=200.0)
        for rank, answer in enumerate(answers):
            found += [
                Verdict(Cell(*cell), f"rank {rank}: {wrong}" * bool(wrong), tuple(left)) for cell, wrong, left in answer
            ]
    return found


def verdicts(asked: list[Cell]) -> list[Verdict]:
    """For `run_ranks`: of each cell, on this rank."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    is_installed = any(cell.way.startswith("install") for cell in asked)
    if is_installed:
        ow.install(graphs=any(WAYS[cell.way].is_compiled for cell in asked))
    try:
        with config.patch(fallback_by_default=True, compile_threads=1), autograd_config.patch(donated_buffer=False):
            return [_judged(cell, mesh, other) for cell in asked]
    finally:
        if is_installed:
            ow.uninstall()


def _judged(cell: Cell, mesh: Any, other: Any) -> Verdict:
    way, circumstance = WAYS[cell.way], CIRCUMSTANCES[cell.circumstance]
    report.SITES.clear()
    try:
        wrong = _wrong(cell, (way, circumstance), mesh, other)
    except Exception as error:  # noqa: BLE001 - whatever it is, the cell has failed, and says so
        wrong = f"{type(error).__name__}: {error}"[:300]
    left = tuple(f"{name}: {reason}" for name, site in report.SITES.items() for reason in site.by_torch)
    if not wrong and way.is_plan and circumstance.stays_fused and left and cell.model not in READ_WHOLE:
        wrong = f"left to torch: {', '.join(left)}"
    return Verdict(cell, wrong, left)


def _wrong(cell: Cell, how: tuple[Way, Circumstance], mesh: Any, other: Any) -> str:
    way, circumstance = how
    tensor_parallel = mesh["tp"]
    boundary = other if circumstance.two_meshes else tensor_parallel
    single, model = cut_model(cell.model, way, tensor_parallel, boundary)
    if way.is_compiled:
        torch._dynamo.reset()
        model.compile(dynamic=False)
    generator = torch.Generator().manual_seed(3)
    whole, factors = torch.randn(2, 8, WIDTH, generator=generator), torch.randn(2, 8, WIDTH, generator=generator)
    own = [each.chunk(dist.get_world_size(), 1)[dist.get_rank()] if way.sequence else each for each in (whole, factors)]
    wanted = Case(single, whole.clone().requires_grad_(), factors)
    got = Case(model, own[0].clone().requires_grad_(), own[1], mesh, way.sequence)
    got.by_torch = lambda: cut_model(cell.model, torchs(way.sequence), tensor_parallel)[1]
    tolerance = max(circumstance.tolerance, COARSE * single.roughly)
    circumstance.run(wanted)
    circumstance.run(got)
    parameters = {name.replace(".inner", ""): each for name, each in got.model.named_parameters()}
    of_x = wanted.x.grad
    if of_x is not None and way.sequence:
        of_x = of_x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    found = [_difference("input", got.x.grad, of_x, tolerance)]
    for name, truth in wanted.model.named_parameters():
        gradient = whole_gradient(parameters[name], truth)
        if gradient is not None and _is_of_own_rows(name, way, single):
            dist.all_reduce(gradient := gradient.clone())
        found.append(_difference(name, gradient, truth.grad, tolerance))
    return "; ".join(each for each in found if each)


def _is_of_own_rows(name: str, way: Way, single: Situated) -> bool:
    """Whether the gradient of a parameter is what this rank's rows of the result give, which the caller sums."""
    is_last_bias = name in [f"{row}.bias" for row in single.rows]
    return way.sequence and (name in single.of_own_rows or (is_last_bias and not way.sums_biases))


def _difference(name: str, got: Any, wanted: Any, tolerance: float) -> str:
    if wanted is None or got is None:
        return "" if wanted is got else f"{name}: {'no gradient' if got is None else 'a gradient'}"
    largest = max(wanted.abs().max().item(), 1e-6)
    off = (got.detach() - wanted).abs().max().item() / largest
    ratio = (got.norm() / wanted.norm().clamp_min(1e-12)).item()
    return "" if off <= tolerance else f"{name}: off by {off:.2g}, {ratio:.2f} times as large"
