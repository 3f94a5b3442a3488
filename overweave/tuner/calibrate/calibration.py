"""The measurements of a GPU for its machine file, in parts, and the source of each number."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from overweave.hardware.machine import Machine
from overweave.ir.plan import MatmulConfig
from overweave.memory.cuda.card import gpu_of
from overweave.memory.cuda.peer_access import has_peer_access
from overweave.runtime.diagnosis import driver_version
from overweave.runtime.finding import installed
from overweave.tuner.calibrate import rates
from overweave.tuner.calibrate.latencies import element_wise, latencies, measure, push_points
from overweave.tuner.calibrate.machine_file import CalibratedGpu
from overweave.tuner.calibrate.rates import Tile
from overweave.tuner.calibrate.samples import Bench, Queues

PARTS = ("latencies", "memory", "library matmuls", "tiles of the kernels")
Tell = Callable[[str, float], None]  # which part, and how many of them are done


def measure_machine(like: Machine, on_part: Tell) -> tuple[CalibratedGpu, str]:
    """Return the measurements, and the source to write beside them. Collective; on one rank links are not measured.
    on_part: called with the part, and how many are done."""
    device = torch.device("cuda", torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    on_part(PARTS[0], 0)
    bench = Bench(device)
    queues = Queues(bench)
    raw = measure(bench, queues)
    numbers = latencies(raw)
    call_us = numbers["call"] + numbers["kernel"]
    pushed = push_points(bench, queues, raw) if bench.world_size > 1 else ()
    on_part(PARTS[1], 1)
    passes, memory = element_wise(call_us), rates.memory_gb_per_s(call_us)
    on_part(PARTS[2], 2)
    scale = rates.library_scale(like)
    measured = CalibratedGpu(
        device=torch.cuda.get_device_name(device),
        sms=sms,
        memory_gb_per_s=memory,
        latencies=numbers,
        passes=passes,
        tiles=_tiles(sms, call_us, on_part),
        library_scale=scale,
        push_points=pushed,
        peer_access=has_peer_access(device) if torch.cuda.device_count() > 1 else None,
        card=gpu_of(device),
    )
    dist.barrier()
    torch.cuda.synchronize()
    return measured, source_of(measured.device, bench.world_size)


def source_of(device: str, world_size: int) -> str:
    """Return when, where and with which software was measured."""
    versions = f"torch {torch.__version__}, triton {installed('triton')}, CUDA {torch.version.cuda}"
    where = f"{world_size} x {device}, driver {driver_version() or 'unknown'}"
    return f"measured {datetime.now(UTC).date()} on {where}, {versions}: overweave calibrate"


def _tiles(sms: int, call_us: float, on_part: Tell) -> tuple[tuple[MatmulConfig, Tile], ...]:
    """Return the measured rate of each tile shape of this GPU's kernels."""
    configs = [config for kernel in rates.kernels_here() for config in rates.tile_configs(kernel)]
    rates_of = []
    for done, config in enumerate(configs):
        on_part(f"{config.kernel} {config.block_m} x {config.block_n}", 3 + done / len(configs))
        rates_of.append((config, rates.tile_rate(config, sms, call_us)))
        torch.cuda.empty_cache()
    return tuple(rates_of)
