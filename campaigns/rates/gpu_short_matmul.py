"""Where the time of a short launch of the Hopper matmul goes, beside cuBLAS, and what it does with odd sizes. One GPU.

    python -m campaigns.gpu_short_matmul [--only WORD ...] [--repeats 1000] [--samples 100] [--picture FILE]

odd       Integers over sizes of 0, 1, primes and ragged ones, in both layouts, bit for bit, by our kernel or by the
          library, and by which (odd_sizes.py).
launch    Launches at a k of 64, ours and the library's by turns, by events; with operands and table in the L2 cache,
          and driven out of it. `nothing`: our kernel with no tile left to claim.
parts     The parts of such a launch by the device's clock (short_parts.py): the kernel before it and the one behind it
          take the time, and between them the kernel itself, traced.
repeats   Equal bits over repeats: whole tiles, tiles dealt out along k, and fp8 with scales of rows.
fp8       fp8 with scales of rows beside torch._scaled_mm.

Each is a step, all by default. Ends with 1 if a result is wrong or a promise broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from campaigns.gpu_ranks import need_gpus
from campaigns.rates.bandwidth_kernels import stamp_kernel
from campaigns.rates.odd_sizes import SIZES, check_size
from campaigns.rates.operands import checked_matmul, make_normal, operands, product
from campaigns.rates.scaled_alone import scaled_matmul, scaled_operands
from campaigns.rates.short_parts import Parts, mean_of, parts_of, save_picture, table
from campaigns.rates.tile_times import Shape, chosen
from campaigns.verdict import Verdict, tell
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import KernelCall
from overweave.tuner.calibrate.rates import Matmul, medians_us, rows_of
from overweave.tuner.measure.timer import geometric_mean

SHORT_K = 64
SHORT = ((128, 256), (1024, 1536), (2048, 2048))  # one tile; a wave
MOST_BEYOND_US, LEAST_FP8 = 0.5, 0.95
FP8_SHAPES = (
    (512, 4096, 14336), (1024, 1536, 4096), (2048, 7168, 4096), (4096, 2560, 8192), (4096, 4608, 7168),
    (2048, 12288, 4096),
)  # fmt: skip
REPEATED = ((1024, 1536, 4096), (4096, 2560, 8192), (1021, 1032, 4104))
COLD_BYTES, SLEEP_CYCLES, MISSED = 160 << 20, 400_000, 3
Step = Callable[[argparse.Namespace], Iterator[Verdict]]


class Cold:
    """A call behind which and before which other memory is in the L2 cache."""

    def __init__(self, call: Callable[[], object], rewind: Callable[[], object], scratch: torch.Tensor) -> None:
        self.run, self._rewind, self._scratch = call, rewind, scratch

    def __call__(self) -> None:
        self.reset_claims()
        self.run()

    def reset_claims(self) -> None:
        """Behind it the cache holds nothing of the call."""
        self._rewind()
        self._scratch.zero_()


def sms_here() -> int:
    """Those of the GPU."""
    return torch.cuda.get_device_properties(0).multi_processor_count


def odd(_: argparse.Namespace) -> Iterator[Verdict]:
    """Sizes of which few are whole tiles."""
    by_library = 0
    for m, n, k in SIZES:
        for is_transposed in (True, False):
            said = check_size(m, n, k, is_transposed, sms_here())
            by_library += ": by the library" in said
            print(said, flush=True)
    count = 2 * len(SIZES)
    yield Verdict("odd sizes are bit-equal", f"{count}, {by_library} of them by the library", True)


class Short:
    """One short matmul: ours, the same without tiles, and the library's."""

    def __init__(self, m: int, n: int) -> None:
        a, b = operands(m, n, SHORT_K)
        exact = product(a, b)
        config = chosen((m, n, SHORT_K), sms_here(), 1).config
        self.name = f"{m} x {n} x {SHORT_K}, {config.block_m} x {config.block_n}"
        self.ours, self.idle = checked_matmul(config, a, b, exact), checked_matmul(config, a, b, exact)
        rows = rows_of(m, n, SHORT_K, config)
        self.traced = Matmul(config, rows, a, b, torch.empty_like(exact), traced=True)
        self.tiles = len(rows)
        out, other = torch.empty_like(exact), b.contiguous()
        self.library: list[Callable[[], object]] = [
            lambda: torch.mm(a, b, out=out),
            lambda: torch.mm(a, other, out=out),
        ]


def launch(asked: argparse.Namespace) -> Iterator[Verdict]:
    """By events, all calls by turns."""
    scratch, beyond = torch.empty(COLD_BYTES, dtype=torch.int8, device="cuda"), list[float]()
    for m, n in SHORT:
        one = Short(m, n)
        cold = [Cold(one.ours.run, one.ours.reset_claims, scratch), Cold(one.idle.run, lambda: None, scratch)]
        cold += [Cold(call, lambda: None, scratch) for call in one.library]
        times = medians_us([one.ours, one.idle.run, *one.library, *cold], asked.samples)
        for cache, (ours, idle, *libraries) in (("cached", times[:4]), ("cold", times[4:])):
            over = ours - min(libraries)
            said = f"ours {ours:6.2f}, nothing {idle:6.2f}, library {min(libraries):6.2f}: beyond it {over:5.2f} us"
            print(f"{one.name:28s} {cache:7s} {said}", flush=True)
            beyond += [over] if cache == "cached" else []
    said = f"{max(beyond):.2f} us over {len(beyond)} shapes"
    yield Verdict(f"a launch at k = {SHORT_K} is {MOST_BEYOND_US} us beyond the library's at most", said,
                  max(beyond) <= MOST_BEYOND_US)  # fmt: skip


def parts(asked: argparse.Namespace) -> Iterator[Verdict]:
    """By the device's clock."""
    scratch = torch.empty(COLD_BYTES, dtype=torch.int8, device="cuda")
    times = torch.zeros(2, dtype=torch.int64, device="cuda")
    found, beside = dict[str, Parts](), dict[str, dict[str, float]]()
    for m, n in SHORT:
        one = Short(m, n)
        others: dict[str, Callable[[], object]] = {
            "untraced": one.ours.run, "nothing": one.idle.run, "library": one.library[0],
            "library b": one.library[1], "two stamps": lambda: None,
        }  # fmt: skip
        for cache in ("cached", "cold"):
            name = f"{one.name} {cache}"
            samples, wholes = list[Parts](), {other: list[float]() for other in others}
            for turn in range(-MISSED, asked.samples):
                before, behind = between(one.traced.run, one.traced.reset_claims, times, scratch, cache == "cold")
                traced = parts_of(one.traced.trace.cpu(), before, behind)
                samples += [traced] if turn >= 0 else []
                for other, call in others.items():
                    before, behind = between(call, one.ours.reset_claims, times, scratch, cache == "cold")
                    wholes[other] += [(behind - before) / 1e3] if turn >= 0 else []
            found[name] = mean_of(samples)
            beside[name] = {other: sum(each) / len(each) for other, each in wholes.items()}
    print(*table(found, beside), sep="\n", flush=True)
    if asked.picture:
        save_picture(asked.picture, found, beside)
    yield Verdict("parts of a launch by the device clock", f"{len(found)} launches", None)


def between(
    call: Callable[[], object], rewind: Callable[[], object], times: torch.Tensor, scratch: torch.Tensor, is_cold: bool
) -> tuple[int, int]:
    """The device's clock before and behind a call, in ns; the host is ahead of both."""
    torch.cuda._sleep(SLEEP_CYCLES)
    rewind()
    if is_cold:
        scratch.zero_()
    stream = torch.cuda.current_stream().cuda_stream
    stamp(times, 0).start(stream)
    call()
    stamp(times, 1).start(stream)
    before, behind = times.tolist()
    return before, behind


STAMPS: dict[int, Launch] = {}


def stamp(times: torch.Tensor, at: int) -> Launch:
    """Made once for each."""
    if at not in STAMPS:
        STAMPS[at] = Launch(KernelCall(stamp_kernel, [times, at], {"num_warps": 1}))
    return STAMPS[at]


def repeats(asked: argparse.Namespace) -> Iterator[Verdict]:
    """The same bits, whoever ends first."""
    for shape in REPEATED:
        for word, split_k in (("whole tiles", 1), ("tiles dealt out in 3", 3)):
            yield repeated(f"{shape} bf16, {word}", bf16(shape, split_k), asked.repeats)
    for shape in FP8_SHAPES[:2]:
        yield repeated(f"{shape} fp8 by rows", scaled_matmul(scaled_operands(*shape), sms_here()), asked.repeats)


def bf16(shape: Shape, split_k: int) -> Matmul:
    """In the tile that the model takes where none is dealt out, on normal numbers."""
    m, n, k = shape
    a, b = operands(m, n, k)
    matmul = checked_matmul(chosen(shape, sms_here(), 1).config, a, b, product(a, b), split_k)
    make_normal(a, b)
    return matmul


def repeated(name: str, matmul: Matmul, count: int) -> Verdict:
    """Runs it so often, and counts on the device how many results are others than the first."""
    matmul()
    first, others = matmul.out.clone(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(count):
        matmul.out.fill_(float("nan"))
        matmul()
        others += (matmul.out.view(torch.int16) != first.view(torch.int16)).any()
    return Verdict(f"{name}: the same bits", f"{int(others)} of {count} are others", int(others) == 0)


def fp8(_: argparse.Namespace) -> Iterator[Verdict]:
    """Bit-equal on exact products, then by turns with the library."""
    shares = []
    for shape in FP8_SHAPES:
        a, b, scale_x, scale_w = scaled_operands(*shape)
        matmul = scaled_matmul((a, b, scale_x, scale_w), sms_here())
        matmul()
        exact = ((a.float() @ b.float()) * scale_x * scale_w).bfloat16()
        assert torch.equal(matmul.out, exact), f"fp8 {shape}: wrong"
        out = torch.empty_like(exact)

        def library(a=a, b=b, scale_x=scale_x, scale_w=scale_w, out=out) -> None:  # type: ignore[no-untyped-def]
            torch._scaled_mm(a, b, scale_x, scale_w, out_dtype=torch.bfloat16, out=out)

        theirs, ours = medians_us([library, matmul])
        shares.append(theirs / ours)
        print(
            f"fp8 by rows {shape}: ours {ours:7.1f} us, torch._scaled_mm {theirs:7.1f}, {theirs / ours:.3f}", flush=True
        )
    said = f"{geometric_mean(shares):.3f} over {len(shares)}, the worst {min(shares):.3f}"
    yield Verdict(f"fp8 with scales of rows is {LEAST_FP8} of torch._scaled_mm", said, min(shares) >= LEAST_FP8)


STEPS: dict[str, Step] = {"odd": odd, "launch": launch, "parts": parts, "repeats": repeats, "fp8": fp8}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu_short_matmul")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--picture", type=Path, help="a PNG file of the parts")
    asked = parser.parse_args()
    need_gpus()
    codes = [tell(STEPS[step](asked)) for step in dict.fromkeys(asked.only)]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
