"""Tile kernels whose results lie block by block, and what moves them out of the blocks, alone on one GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.ir.blocks import Blocks, stored_shape
from overweave.ir.epilogue import Norm
from overweave.ir.plan import MatmulConfig, Plan, ReduceConfig
from overweave.ir.problem import Problem
from overweave.ir.tile_order import NO_SIGNAL, TileRow
from overweave.kernels.arguments import AfterSums, LaunchTiles, SignalWords
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import TileKernelArgs, table_tensor
from overweave.runtime.kernel_calls.sums_and_copies import ReductionCall, reduction_call
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import STAGED, SUMS, TILES
from overweave.schedules.tiles.shape import row_shape
from overweave.tuner.calibrate.rates import Matmul

RANKS = 2  # of the plan whose tables a lone GPU runs: it waits for nobody
EPS = 1e-5
Shape = tuple[int, int, int]


class Move:
    """Rows of a sum to their place, normed: the last step of an all-reduce, of one operand."""

    def __init__(self, config: ReduceConfig, rows: tuple[TileRow, ...], source: torch.Tensor, blocks: Blocks | None,
                 out: torch.Tensor) -> None:  # fmt: skip
        """blocks: how the source lies, if not row by row."""
        device, n = out.device, out.shape[1]
        words, limits = torch.zeros(64, dtype=torch.int32, device=device), torch.tensor([10**9, 0, 0], device=device)
        self._claims = torch.zeros(4, dtype=torch.int32, device=device)
        trace = torch.zeros((1, TRACE_COLUMNS.value), dtype=torch.int64, device=device)
        queue = LaunchTiles(table_tensor(rows, device), self._claims, trace, len(rows))
        weight, z = torch.ones(n, dtype=out.dtype, device=device), torch.empty_like(out)
        operands = torch.tensor([[source.data_ptr(), 0, 0]], dtype=torch.int64, device=device)
        sums = ReductionCall(operands, (1, 0, 1), out, n, AfterSums(norm_weight=weight, z=z), EPS)
        if blocks is not None:
            places = torch.tensor(blocks.places, dtype=torch.int32, device=device)
            sums = sums._replace(cells=places, cell=(blocks.rows, blocks.cols))
        self._kept = source, z
        self.launch = Launch(
            reduction_call(config, TileKernelArgs(queue, SignalWords(words, words, limits, 1), False), sums)
        )

    def reset_claims(self) -> None:
        """All tiles are there to be claimed again."""
        self._claims.zero_()

    def run(self) -> None:
        """The tiles that nobody has claimed yet."""
        self.launch.start(torch.cuda.current_stream().cuda_stream)

    def __call__(self) -> None:
        self.reset_claims()
        self.run()


class Stored(NamedTuple):
    """A matmul that stores block by block, with the plan that says how."""

    plan: Plan
    matmul: Matmul
    blocks: Blocks

    @property
    def config(self) -> MatmulConfig:
        assert self.plan.realization.matmul is not None
        return self.plan.realization.matmul


def plan_of(shape: Shape, has_norm: bool = False, library_sms: int = 16, groups: str = "auto") -> Plan:
    """The wave groups of an all-reduce, in the tiles of the Hopper kernel."""
    m, n, k = shape
    norm = Norm(eps=EPS, residual=False) if has_norm else None
    problem = Problem(operator="matmul_all_reduce", m=m, n=n, k=k, world_size=RANKS, dtype="bfloat16", norm=norm)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    options: dict[str, str | int] = {"kernel": "hopper", "sms": sms, "library_sms": library_sms, "groups": groups}
    return build("matmul_all_reduce.waves", problem, options, rank=0)


def stored(plan: Plan, a: torch.Tensor, b: torch.Tensor, sms_beside: int = 0, traced: bool = False) -> Stored:
    """The tiles of a plan on one GPU, which tell nobody."""
    buffer = plan.schedule.buffer(STAGED)
    out = torch.full(stored_shape(buffer), float("nan"), device=a.device, dtype=a.dtype)
    rows = tuple(row._replace(signal=NO_SIGNAL) for row in plan.tile_order(0, TILES).rows)
    assert plan.realization.matmul is not None
    assert buffer.blocks is not None
    matmul = Matmul(plan.realization.matmul, rows, a, b, out, traced=traced, sms_beside=sms_beside)
    return Stored(plan, matmul, buffer.blocks)


def restored(plan: Plan, source: torch.Tensor, blocks: Blocks, out: torch.Tensor) -> Move:
    """The move of such a plan, whose rows end with a norm."""
    assert plan.realization.reduction is not None
    return Move(plan.realization.reduction, plan.tile_order(0, SUMS).rows, source, blocks, out)


def plain_move(source: torch.Tensor, out: torch.Tensor) -> Move:
    """The same of rows that lie in place, in tiles of its own."""
    m, n = out.shape
    config = row_shape(m, n, torch.cuda.get_device_properties(0).multi_processor_count)
    tops = range(0, m, config.block_m)
    rows = tuple(TileRow(1, top, min(top + config.block_m, m), 0, 1, top, 0, 0, 0, NO_SIGNAL, 0) for top in tops)
    return Move(config, rows, source, None, out)


def in_place(source: torch.Tensor, blocks: Blocks, shape: tuple[int, int]) -> torch.Tensor:
    """The matrix that lies in a stack of cells, by torch."""
    (m, n), (rows, cols) = shape, (blocks.rows, blocks.cols)
    high, wide = -(-m // rows), -(-n // cols)
    places = torch.tensor(blocks.places, device=source.device)
    cells = source.view(-1, rows, cols)[places].view(high, wide, rows, cols)
    return cells.permute(0, 2, 1, 3).reshape(high * rows, wide * cols)[:m, :n]
