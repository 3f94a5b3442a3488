"""The matmul of few rows under the interpreter, in small tiles."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.plan import SkinnyConfig
from overweave.ir.schedule import Compute
from overweave.memory.cuda.shares import Shares
from overweave.runtime import interpreter
from overweave.runtime.gpu.kernels.skinny_call import Factors, share_places, skinny_arguments
from overweave.runtime.library.library import View

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from overweave.kernels.skinny import skinny_matmul_kernel  # noqa: E402

_TILE = {"block_m": 16, "block_n": 32, "block_k": 16}  # several tiles and steps even of small products


def multiply_few_rows(config: SkinnyConfig, compute: Compute, view: View) -> None:
    """One launch on one rank, in as many shares as on a GPU. Returns when all programs have ended."""
    a, b, out = view(compute.a[0]), view(compute.b), view(compute.out[0])
    small = replace(config, **_TILE)
    places = share_places(small, out.shape[0], out.shape[1])
    shares = Shares.allocate(places, small.block_m * small.block_n, out.device) if places else None
    arguments, programs = skinny_arguments(small, Factors(a, b, out, (a, b, out)), shares)
    if programs:
        skinny_matmul_kernel[(programs,)](*arguments)
    assert shares is None or not shares.arrivals.any(), "the next launch finds the counters at zero"
