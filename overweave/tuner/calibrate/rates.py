"""Rates of one GPU: of its memory, of matmuls and tiles by each kernel, and of cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from overweave.compat.torch_names import sleep
from overweave.hardware.machine import Machine, TileRate
from overweave.ir.dtype import Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.ir.tile_order import TileRow
from overweave.kernels.arguments import LaunchTiles, SignalWords
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.runtime.gpu.bound import free_sms
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import TileKernelArgs, table_tensor
from overweave.runtime.kernel_calls.matmul import Operands, matmul_call
from overweave.schedules.catalog.catalog import build
from overweave.schedules.tiles.shape import KernelChoice, shapes
from overweave.sim.cost import library_matmul_us


class Matmul:
    """`out = a @ b` over a table without waits."""

    def __init__(
        self,
        config: MatmulConfig,
        rows: tuple[TileRow, ...],
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        epilogue: Epilogue = NO_EPILOGUE,
        extras: Mapping[str, torch.Tensor] = MappingProxyType({}),
        traced: bool = False,
        sms_beside: int = 0,
    ) -> None:
        """extras: operands of the epilogue, by name. traced: each run fills `trace`, int64 `[rows, TRACE_COLUMNS]`.
        sms_beside: SMs that it leaves free.
        """
        device, is_transposed = a.device, b.stride(0) == 1 and b.stride(1) != 1
        words = torch.zeros(64, dtype=torch.int32, device=device)
        limits = torch.tensor([10**9, 0, 0], dtype=torch.int64, device=device)
        trace_size = (len(rows) if traced else 1, TRACE_COLUMNS.value)
        self.trace = torch.zeros(trace_size, dtype=torch.int64, device=device)
        self._claims = torch.zeros(1, dtype=torch.int32, device=device)
        self.out = out
        queue = LaunchTiles(table_tensor(rows, device), self._claims, self.trace, len(rows))
        known: dict[str, Any] = {**extras, "epilogue": epilogue}
        operands = Operands(a, None, ((b, out),), is_transposed, **known)
        tiles = TileKernelArgs(queue, SignalWords(words, words, limits, 1), traced)
        self.launch = Launch(matmul_call(config, operands, tiles), free_sms(device, sms_beside))

    def __call__(self) -> None:
        """Compute all tiles on the current stream."""
        self.reset_claims()
        self.run()

    def reset_claims(self) -> None:
        """Zero the work counter: all tiles can be claimed again."""
        self._claims.zero_()

    def run(self) -> None:
        """Compute the tiles that are not claimed yet."""
        self.launch.start(torch.cuda.current_stream().cuda_stream)


SAMPLES = 9
SHAPE_OPTIONS = ("block_m", "block_n", "block_k", "group_m", "stages", "warps", "split_n", "kernel")


def rows_of(m: int, n: int, k: int, config: MatmulConfig) -> tuple[TileRow, ...]:
    """Return the tile table of an ordinary matmul: all_gather_matmul in a group of one."""
    problem = Problem(operator="all_gather_matmul", m=m, n=n, k=k, world_size=1, dtype="bfloat16")
    options: dict[str, int | str] = {name: getattr(config, name) for name in SHAPE_OPTIONS}
    options["sms"] = torch.cuda.get_device_properties(0).multi_processor_count
    return build("all_gather_matmul.push", problem, options).tile_orders[0].rows


def medians_us(calls: list[Callable[[], object]], samples: int = SAMPLES) -> list[float]:
    """Return the median device time of each call. The calls alternate, each behind a sleep that hides the host. A table
    of tiles is rewound before its time begins; in a plan the call's prologue does that."""
    times: list[list[float]] = [[] for _ in calls]
    for sample in range(-2, samples):
        for offset in range(len(calls)):
            index = (offset + sample) % len(calls)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call = calls[index]
            sleep(200_000)
            run = call
            if isinstance(call, Matmul):
                call.reset_claims()
                run = call.run
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if sample >= 0:
                times[index].append(float(begin.elapsed_time(end)) * 1e3)
    return [sorted(each)[samples // 2] for each in times]


COPIED_BYTES = 1 << 31
SHORT_K, LONG_K = 2048, 8192
WAVES = 2
DTYPE: Dtype = "bfloat16"
HOPPER_CAPABILITY = 9
# Large shapes of cuBLAS matmuls, with full and partial last waves, by which its rate is scaled.
LIBRARY_SHAPES = (
    *((8192, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096)),
    *((2048, 12288, 12288), (16384, 2048, 8192), (8192, 3584, 4096)),
)


class Tile(NamedTuple):
    """A tile shape's rate: of its main loop on all SMs, and the overhead of a tile."""

    tflops: float
    overhead_us: float


def memory_gb_per_s(call_us: float) -> float:
    """Return bytes read plus written by a copy within the GPU. call_us: of a call and its kernel, which it takes
    too."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (us,) = medians_us([lambda: target.copy_(source)])
    return 2 * COPIED_BYTES / (us - call_us) / 1e3


def kernels_here() -> tuple[KernelChoice, ...]:
    """Return the tile kernels that this GPU runs."""
    is_hopper = torch.cuda.get_device_capability()[0] == HOPPER_CAPABILITY
    return ("hopper", "portable") if is_hopper else ("portable",)


def tile_configs(kernel: KernelChoice) -> tuple[MatmulConfig, ...]:
    """Return the first config of each tile shape of a kernel in the catalog."""
    first: dict[tuple[int, int], MatmulConfig] = {}
    for shape in shapes(DTYPE, kernel):
        first.setdefault((shape.config.block_m, shape.config.block_n), shape.config)
    return tuple(first.values())


def tile_rate(config: MatmulConfig, sms: int, call_us: float) -> Tile:
    """Return a tile's rate, from matmuls of whole waves with a short and a long k."""
    short_us, long_us = medians_us([_whole_waves(config, sms, k) for k in (SHORT_K, LONG_K)])
    return split_us(config, sms, (short_us - call_us) / WAVES, (long_us - call_us) / WAVES)


def split_us(config: MatmulConfig, sms: int, short_us: float, long_us: float) -> Tile:
    """Return a tile's rate and overhead, from its times with a short and a long k."""
    by_k = (long_us - short_us) / (LONG_K - SHORT_K)
    tflops = 2.0 * config.block_m * config.block_n * sms / by_k / 1e6
    return Tile(tflops, max(0.0, short_us - SHORT_K * by_k))


def library_scale(machine: Machine) -> float:
    """Return cuBLAS' speed here over its speed on a described machine: the median over some shapes."""
    return median(
        library_matmul_us(machine, shape, DTYPE) / us
        for shape, us in zip(LIBRARY_SHAPES, medians_us([_library(shape) for shape in LIBRARY_SHAPES]), strict=True)
    )


def scale_rates(rates: tuple[TileRate, ...], scale: float, source: str) -> list[dict[str, object]]:
    """Return a machine file's tiles with their rates multiplied by `scale`."""
    return [
        {
            "kernel": rate.kernel, "block_m": rate.block_m, "block_n": rate.block_n,
            "tflops": round(rate.tflops * scale, 1), "overhead_us": rate.overhead_us, "source": source,
        }
        for rate in rates
    ]  # fmt: skip


def _whole_waves(config: MatmulConfig, sms: int, k: int) -> Matmul:
    """Return a matmul of WAVES full waves of tiles, as square as the number of SMs allows."""
    high = max(side for side in range(1, int((WAVES * sms) ** 0.5) + 1) if WAVES * sms % side == 0)
    m, n = high * config.block_m, WAVES * sms // high * config.block_n
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    matmul = Matmul(config, rows_of(m, n, k, config), a, b, out)
    matmul()
    return matmul


def _library(shape: tuple[int, int, int]) -> Callable[[], object]:
    """Return a call of torch.mm on this shape."""
    m, n, k = shape
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(a, b, out=out)
