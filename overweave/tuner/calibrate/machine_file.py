"""The machine file of a calibration. What one GPU cannot measure, such as links, is copied from a named machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from overweave.hardware.cards import Gpu
from overweave.hardware.machine import Latencies, Machine, decode
from overweave.ir.plan import MatmulConfig
from overweave.memory.cuda.card import gpu_of
from overweave.memory.cuda.heap import has_peer_access
from overweave.runtime.diagnosis import driver_version
from overweave.runtime.finding import installed
from overweave.tuner.calibrate import rates
from overweave.tuner.calibrate.attention import MeasuredAttention, attention_rates
from overweave.tuner.calibrate.latencies import Bench, Queues, element_wise, latencies, measure, push_points
from overweave.tuner.calibrate.rates import Tile, scale_rates

FROM_FILE = ("topology", "links", "collectives", "sharing", "dtypes", "few_rows")


class CalibratedGpu(Struct, frozen=True):
    """The measurements of one GPU.

    latencies: microseconds by their names in the file. passes: GB/s of torch's element-wise kernels. library_scale:
    cuBLAS' rate over that of the named machine. attention: rates of torch's. push_points: of copies between GPUs, if
    there are several. peer_access: as of a Machine; None if there is one GPU. card: the GPU as its driver reports it.
    """

    device: str
    sms: int
    memory_gb_per_s: float
    latencies: dict[str, float]
    passes: dict[str, float]
    tiles: tuple[tuple[MatmulConfig, Tile], ...]
    library_scale: float
    attention: tuple[MeasuredAttention, ...] = ()
    push_points: tuple[tuple[int, float], ...] = ()
    peer_access: bool | None = None
    card: Gpu | None = None


def machine_file(name: str, measured: CalibratedGpu, like: Machine, source: str) -> bytes:
    """Return the file's content, decoded once to check it. source: date, device, versions, command."""
    content = msgspec.json.format(msgspec.json.encode(_records(name, measured, like, source)), indent=1)
    decode(content, f"{name}.json")
    return content + b"\n"


def _records(name: str, measured: CalibratedGpu, like: Machine, source: str) -> dict[str, object]:
    """Return the file's content as JSON values."""
    rate = {"gb_per_s": round(measured.memory_gb_per_s), "source": source}
    latencies = {
        key: {"us": round(max(0.0, us), 2), "source": source}
        for key, us in measured.latencies.items()
        if key in Latencies.__struct_fields__
    }
    links: Mapping[str, object] = {}
    if measured.push_points:
        links = {"links": {"push": {"points": [list(point) for point in measured.push_points], "source": source}}}
    card = {} if measured.card is None else {"card": _card(measured.card, source)}
    access = {} if measured.peer_access is None else {"peers": {"is_there": measured.peer_access, "source": source}}
    return {
        "like": like.name,
        "name": name,
        "title": f"{measured.device}, calibrated; links as {like.title}",
        "gpus": like.gpus,
        "basis": "calibrated",
        **card,
        "processor": {"sms": measured.sms, "source": source},
        "hbm": rate,
        "local_copies": {"by": like.local_copies.by, **rate},
        "element_wise": {key: {"gb_per_s": round(each), "source": source} for key, each in measured.passes.items()},
        "attention": [
            {
                **each._asdict(),
                "tflops": round(each.tflops, 1),
                "overhead_us": round(each.overhead_us, 1),
                "source": source,
            }
            for each in measured.attention
        ],
        "tiles": [*_tiles(measured, source), *_library_tiles(measured, like, source), *_scaled_tiles(measured, like)],
        "latency": latencies,
        **links,
        **access,
    }


def _card(gpu: Gpu, source: str) -> dict[str, object]:
    return {
        "names": [gpu.name], "capability": list(gpu.capability), "memory_gib": gpu.memory_gib, "joined": gpu.joined,
        "source": source,
    }  # fmt: skip


def _tiles(measured: CalibratedGpu, source: str) -> list[dict[str, object]]:
    """Return the measured tile rates as records."""
    return [
        {
            "kernel": config.kernel, "block_m": config.block_m, "block_n": config.block_n,
            "tflops": round(tile.tflops, 1), "overhead_us": round(tile.overhead_us, 2), "source": source,
        }
        for config, tile in measured.tiles
    ]  # fmt: skip


def _library_tiles(measured: CalibratedGpu, like: Machine, source: str) -> list[dict[str, object]]:
    times = f"{source}: {measured.library_scale:.3f} times the rate of {like.name}, by torch.mm"
    return scale_rates(like.tiles_of("library"), measured.library_scale, times)


def _scaled_tiles(measured: CalibratedGpu, like: Machine) -> list[dict[str, object]]:
    """Return rates of shapes that were not measured, in proportion to those that were; of measured kernels only."""
    records: list[dict[str, object]] = []
    for kernel in dict.fromkeys(config.kernel for config, _ in measured.tiles):
        measured_tiles = {(one.block_m, one.block_n): tile for one, tile in measured.tiles if one.kernel == kernel}
        theirs = like.tiles_of(kernel) if any(tile.kernel == kernel for tile in like.tiles) else ()
        both = [rate for rate in theirs if (rate.block_m, rate.block_n) in measured_tiles]
        if both:
            factors = [measured_tiles[rate.block_m, rate.block_n].tflops / rate.tflops for rate in both]
            scale = sum(factors) / len(factors)
            rest = tuple(rate for rate in theirs if (rate.block_m, rate.block_n) not in measured_tiles)
            records += scale_rates(
                rest, scale, f"estimate: {scale:.3f} times the rate of {like.name}, as its other tiles"
            )
    return records


PARTS = ("latencies", "memory", "library matmuls", "attention", "tiles of the kernels")
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
    on_part(PARTS[3], 3)
    attention = attention_rates(call_us)
    measured = CalibratedGpu(
        device=torch.cuda.get_device_name(device),
        sms=sms,
        memory_gb_per_s=memory,
        latencies=numbers,
        passes=passes,
        tiles=_tile_rates(sms, call_us, on_part),
        library_scale=scale,
        attention=attention,
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


def _tile_rates(sms: int, call_us: float, on_part: Tell) -> tuple[tuple[MatmulConfig, Tile], ...]:
    """Return the measured rate of each tile shape of this GPU's kernels."""
    configs = [config for kernel in rates.kernels_here() for config in rates.tile_configs(kernel)]
    rates_of = []
    for done, config in enumerate(configs):
        on_part(f"{config.kernel} {config.block_m} x {config.block_n}", 4 + done / len(configs))
        rates_of.append((config, rates.tile_rate(config, sms, call_us)))
        torch.cuda.empty_cache()
    return tuple(rates_of)
