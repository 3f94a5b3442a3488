"""What a call's small steps take on GPUs, and passes over elements: numbers of the machine file, as lines to paste.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_latencies

How they are measured stands in overweave/tuner/calibrate/latencies.py; `overweave calibrate` writes a whole machine
file. On one GPU what pairs of ranks exchange is left out.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import torch
import torch.distributed as dist

from campaigns.gpu_ranks import join
from overweave.tuner.calibrate.latencies import Bench, Queues, element_wise, latencies, measure, push_points


def main() -> None:
    bench = Bench(join(timedelta(seconds=20)))
    queues = Queues(bench)
    raw = measure(bench, queues)
    found = latencies(raw)
    copies = push_points(bench, queues, raw)
    if bench.rank == 0:
        where = f"{bench.world_size} x {torch.cuda.get_device_name()}"
        source = f"measured {datetime.now(UTC).date()} on {where}: campaigns/rates/gpu_latencies.py"
        print(json.dumps({"raw": {name: round(us, 2) for name, us in raw.items()}}))
        for name, us in found.items():
            print(f"{json.dumps(name)}: {json.dumps({'us': round(us, 2), 'source': source})},")
        for name, rate in element_wise(found["call"] + found["kernel"]).items():
            print(f"{json.dumps(name)}: {json.dumps({'gb_per_s': round(rate), 'source': source})},")
        print(f'"push points": {json.dumps(copies)}')
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
