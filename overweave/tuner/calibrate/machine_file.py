"""The machine file of a calibration. What one GPU cannot measure, such as links, is copied from a named machine."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from overweave.hardware.cards import Gpu
from overweave.hardware.machine import Latencies, Machine, decode
from overweave.ir.plan import MatmulConfig
from overweave.tuner.calibrate.rates import Tile, scale_rates

FROM_FILE = ("topology", "links", "collectives", "sharing", "dtypes", "few_rows")


class CalibratedGpu(Struct, frozen=True):
    """The measurements of one GPU.

    latencies: microseconds by their names in the file. passes: GB/s of torch's element-wise kernels. library_scale:
    cuBLAS' rate over that of the named machine. push_points: of copies between GPUs, if there are several. peer_access:
    as of a Machine; None if there is one GPU. card: the GPU as its driver reports it.
    """

    device: str
    sms: int
    memory_gb_per_s: float
    latencies: dict[str, float]
    passes: dict[str, float]
    tiles: tuple[tuple[MatmulConfig, Tile], ...]
    library_scale: float
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
