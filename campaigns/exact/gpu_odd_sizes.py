"""Are matmuls of odd sizes right, each by a tile kernel or by the library, and are their bits the same again? One GPU.

    python -m campaigns.gpu_odd_sizes [--repeats 1000]

Integers over sizes of 0, 1, primes and ragged ones, in both layouts, bit for bit, and by which of the two. Then normal
numbers: equal bits over repeats. Ends with 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from campaigns.gpu_ranks import need_gpus
from campaigns.rates.operands import checked_matmul, make_normal, operands, product
from campaigns.rates.tile_fit import chosen
from campaigns.verdict import Verdict, tell
from overweave.ir.problem import Problem
from overweave.schedules.records.needs import ALIGNED
from overweave.schedules.records.record import MethodRequest
from overweave.schedules.tiles.shape import shapes, tile_shape
from overweave.tuner.space.target import Target

# m, n, k: nothing of each; one; primes; multiples of eight and no tile's; what once ended a campaign, n = 2,754.
SIZES = (
    (0, 64, 64), (64, 0, 64), (64, 64, 0), (1, 1, 1), (1, 8, 8), (7, 8, 64), (127, 131, 137), (257, 264, 8),
    (1021, 1032, 520), (4093, 3584, 4096), (4093, 2754, 512), (512, 2754, 4096), (300, 24, 4104),
)  # fmt: skip
REPEATED = ((1024, 1536, 4096), (4096, 2560, 8192), (1021, 1032, 4104))


def library_why(m: int, n: int, k: int) -> str:
    """Why the library multiplies these sizes; nothing if a tile kernel does."""
    if not m * n * k:
        return "there is nothing to multiply"
    problem = Problem(operator="all_gather_matmul", m=m, n=n, k=k, world_size=1, dtype="bfloat16")
    return ALIGNED.why(MethodRequest(problem, {}, Target("cuda")))


def check_size(m: int, n: int, k: int, is_transposed: bool, sms: int) -> Verdict:
    """Multiplies integers and says by which. Raises AssertionError for a wrong result of a tile kernel."""
    a, b = operands(m, n, k, is_transposed)
    exact = product(a, b)
    name = f"{m} x {n} x {k}{' b^T' * is_transposed}"
    if why := library_why(m, n, k):
        return Verdict(name, f"by the library: {why}", torch.equal(torch.mm(a, b), exact))
    config = tile_shape((m,), n, sms, shapes("bfloat16", "hopper"), k)
    checked_matmul(config, a, b, exact)
    return Verdict(name, f"by a tile of {config.block_m} x {config.block_n}", True)


def repeated(shape: tuple[int, int, int], sms: int, count: int) -> Verdict:
    """Runs one matmul so often, and counts on the device how many results are others than the first."""
    m, n, k = shape
    a, b = operands(m, n, k)
    matmul = checked_matmul(chosen(shape, sms), a, b, product(a, b))
    make_normal(a, b)
    matmul()
    first, others = matmul.out.clone(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(count):
        matmul.out.fill_(float("nan"))
        matmul()
        others += (matmul.out.view(torch.int16) != first.view(torch.int16)).any()
    return Verdict(f"{shape}: the same bits", f"{int(others)} of {count} are others", not others)


def verdicts(count: int) -> Iterator[Verdict]:
    """All of them; count: of repeats."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    yield from (check_size(*size, is_transposed, sms) for size in SIZES for is_transposed in (True, False))
    yield from (repeated(shape, sms, count) for shape in REPEATED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    asked = parser.parse_args()
    need_gpus()
    sys.exit(tell(verdicts(asked.repeats)))


if __name__ == "__main__":
    main()
