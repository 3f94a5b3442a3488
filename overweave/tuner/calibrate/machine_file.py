"""A machine file from what was measured here; what one GPU cannot measure, its links first, is a named machine's."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from overweave.hardware.cards import Gpu
from overweave.hardware.machine import Latencies, Machine, decode
from overweave.ir.plan import MatmulConfig
from overweave.tuner.calibrate.rates import Tile, scaled

FROM_FILE = ("topology", "links", "collectives", "sharing", "dtypes", "few_rows")


class CalibratedGpu(Struct, frozen=True):
    """What a calibration found on one GPU. latencies: microseconds by their names in the file. passes: GB/s of the
    library's element-wise kernels. push_points: of copies between GPUs, where there were several.
    peer_access: as of a Machine; None where there is one GPU. card: the GPU as its driver tells it.
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


def machine_file(name: str, found: CalibratedGpu, like: Machine, source: str) -> bytes:
    """The file's content, read back once: it describes a machine. source: date, device, versions, command."""
    told = msgspec.json.format(msgspec.json.encode(_records(name, found, like, source)), indent=1)
    decode(told, f"{name}.json")
    return told + b"\n"


def _records(name: str, found: CalibratedGpu, like: Machine, source: str) -> dict[str, object]:
    rate = {"gb_per_s": round(found.memory_gb_per_s), "source": source}
    latencies = {
        key: {"us": round(max(0.0, us), 2), "source": source}
        for key, us in found.latencies.items()
        if key in Latencies.__struct_fields__
    }
    links: Mapping[str, object] = {}
    if found.push_points:
        links = {"links": {"push": {"points": [list(point) for point in found.push_points], "source": source}}}
    card = {} if found.card is None else {"card": _card(found.card, source)}
    access = {} if found.peer_access is None else {"peers": {"is_there": found.peer_access, "source": source}}
    return {
        "like": like.name,
        "name": name,
        "title": f"{found.device}, calibrated; links as {like.title}",
        "gpus": like.gpus,
        "basis": "calibrated",
        **card,
        "processor": {"sms": found.sms, "source": source},
        "hbm": rate,
        "local_copies": {"by": like.local_copies.by, **rate},
        "element_wise": {key: {"gb_per_s": round(each), "source": source} for key, each in found.passes.items()},
        "tiles": [*_tiles(found, source), *_of_library(found, like, source), *_not_measured(found, like)],
        "latency": latencies,
        **links,
        **access,
    }


def _card(gpu: Gpu, source: str) -> dict[str, object]:
    return {
        "names": [gpu.name], "capability": list(gpu.capability), "memory_gib": gpu.memory_gib, "joined": gpu.joined,
        "source": source,
    }  # fmt: skip


def _tiles(found: CalibratedGpu, source: str) -> list[dict[str, object]]:
    return [
        {
            "kernel": config.kernel, "block_m": config.block_m, "block_n": config.block_n,
            "tflops": round(tile.tflops, 1), "overhead_us": round(tile.overhead_us, 2), "source": source,
        }
        for config, tile in found.tiles
    ]  # fmt: skip


def _of_library(found: CalibratedGpu, like: Machine, source: str) -> list[dict[str, object]]:
    times = f"{source}: {found.library_scale:.3f} times the rate of {like.name}, by torch.mm"
    return scaled(like.tiles_of("library"), found.library_scale, times)


def _not_measured(found: CalibratedGpu, like: Machine) -> list[dict[str, object]]:
    """Other shapes of the kernels that were measured, in proportion; kernels that the GPU does not run are left out."""
    made: list[dict[str, object]] = []
    for kernel in dict.fromkeys(config.kernel for config, _ in found.tiles):
        known = {(one.block_m, one.block_n): tile for one, tile in found.tiles if one.kernel == kernel}
        theirs = like.tiles_of(kernel) if any(tile.kernel == kernel for tile in like.tiles) else ()
        both = [rate for rate in theirs if (rate.block_m, rate.block_n) in known]
        if both:
            factors = [known[rate.block_m, rate.block_n].tflops / rate.tflops for rate in both]
            scale = sum(factors) / len(factors)
            rest = tuple(rate for rate in theirs if (rate.block_m, rate.block_n) not in known)
            made += scaled(rest, scale, f"estimate: {scale:.3f} times the rate of {like.name}, as its other tiles")
    return made
