"""One matmul of an operator with everything that is timed on it: compiled kernels, plans by hand, and the baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from msgspec.structs import replace
from triton.tools.tensor_descriptor import TensorDescriptor

from campaigns.lint.authored_cases import AUTHORS, KERNELS
from campaigns.tables.compiled_variants import GATHER, TENSORS, Tile, Way
from campaigns.tables.table_rows import Row
from overweave.memory.group import Group
from overweave.ops.author.compile import FusedKernel, compile
from overweave.ops.operators import operator_for
from overweave.tuner.measure.baselines import BenchSide, Setting
from overweave.tuner.measure.timer import Effort, median, p90
from overweave.tuner.measure.trial import CheckedCall, TimedTrial
from overweave.tuner.space.shapes import ShapeCase

CONSTANTS: dict[str, int] = {"GROUP_M": 8}  # of the kernel's own order, which a fused kernel does not keep
SMS = 132  # where there is no GPU to ask
# The second call with the same tensors in a slot is captured; from the third on it is one launch.
SLOTS, CALLS_OF_A_GRAPH = 2, 3


class Layer:
    """A case of the shape set, as this rank has it. Collective: all ranks make the same one."""

    def __init__(self, operator: str, case: ShapeCase, group: Group, device: torch.device) -> None:
        setting = Setting(group, device, torch.bfloat16, operator_for)
        self.operator, self.name, self.setting = operator, case.name, setting
        self.side: BenchSide = BenchSide(case.problem(operator, group.world_size, "bf16"), setting)
        rows = case.m if operator == GATHER else self.side.rows[1] - self.side.rows[0]
        (k, n), m = self.side.rights[0].shape, case.m
        self.sizes: tuple[int, int, int] = (m, n, k)
        self.out = torch.empty(rows, n, dtype=setting.dtype, device=device)
        self._turned: list[torch.Tensor] = []
        self._described: dict[tuple[Tile, int], tuple[TensorDescriptor, ...]] = {}

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.sizes))

    @property
    def sets(self) -> int:
        """How many inputs there are; calls take them by turns."""
        return len(self.side.rights)

    def compiled(self, way: Way) -> CheckedCall:
        """The compiled kernel. It is compiled and bound as the call is made first."""
        fused = fused_of(way.tile.kernel, TENSORS[self.operator], way.schedule)
        group = self.setting.group.process_group

        def call(turn: int) -> torch.Tensor:
            fused(*self.arguments(way.tile, turn), group=group, **self.named(way.tile), **way.tile.constants)
            return self.out

        return call

    def planned(self, plan: str) -> CheckedCall:
        """Our operator with a plan by name."""
        return lambda turn: self.side.ours(turn, plan)

    def named(self, tile: Tile) -> dict[str, int]:
        """Further constants of a tile's kernel."""
        if tile.kernel != "persistent":
            return CONSTANTS
        is_cuda = self.setting.device.type == "cuda"
        sms = torch.cuda.get_device_properties(self.setting.device).multi_processor_count if is_cuda else SMS
        return CONSTANTS | {"NUM_SMS": sms}

    def arguments(self, tile: Tile, turn: int) -> tuple[Any, ...]:
        """Of a tile's kernel, but for its constants. `persistent` has its weights the other way round in memory."""
        index, (m, n, k) = turn % self.sets, self.sizes
        if tile.kernel == "persistent":
            return (*self._descriptors(tile, index), m, n, k)
        return (self.side.xs[index], self.side.rights[index], self.out, m, n, k, k, 1, n, 1, n, 1)

    def _descriptors(self, tile: Tile, index: int) -> tuple[TensorDescriptor, ...]:
        if not self._turned:
            self._turned = [weight.t().contiguous() for weight in self.side.rights]
        key = (tile, index)
        if key not in self._described:
            blocks = ((tile.block_m, tile.block_k), (tile.block_n, tile.block_k), (tile.block_m, tile.block_n))
            tensors = (self.side.xs[index], self._turned[index], self.out)
            self._described[key] = tuple(
                TensorDescriptor.from_tensor(tensor, list(block)) for tensor, block in zip(tensors, blocks, strict=True)
            )
        return self._described[key]

    def times(
        self, calls: Mapping[str, CheckedCall], effort: Effort, roofs: Sequence[str] = ()
    ) -> dict[str, tuple[float, ...]]:
        """Samples in paired rounds, of those that run on every rank and, but for roofs, compute what the library does.

        What is left out is told. Collective.
        """
        if self.setting.device.type == "cuda":
            effort = replace(effort, warmup=max(effort.warmup, CALLS_OF_A_GRAPH * self.sets * SLOTS))
        trial = TimedTrial(self.setting, effort, self.side.sequential(0))
        samples = trial.times(calls, roofs)
        for name, reason in trial.left_out.items():
            if self.setting.group.rank == 0:
                print(f"  left out at {self.operator} {self.name}: {name}: {reason}", flush=True)
        return samples.device_us

    def row(self, table: str, point: tuple[str, str, str], samples: Sequence[float]) -> Row:
        """point: the line, the place on it, and what ran."""
        m, n, k = self.sizes
        us = median(samples)
        return Row(table, self.operator, self.shape, *point, us, p90(samples), 2 * m * n * k / us / 1e6)


@lru_cache(maxsize=256)
def fused_of(kernel: str, tensor: str, schedule: str) -> FusedKernel:
    """An annotated kernel of the examples with one exchange."""
    return compile(f"{KERNELS / kernel}.py:{AUTHORS[kernel].name}", {tensor: schedule})


def quickest(samples: Mapping[str, Sequence[float]]) -> str:
    """Whose median is the least."""
    return min(samples, key=lambda name: median(samples[name]))
