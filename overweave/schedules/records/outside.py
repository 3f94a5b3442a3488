"""Torch's own operators on symmetric memory: candidates without a Schedule, which cannot be simulated."""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import LIBRARY
from overweave.schedules.records.needs import DESCRIPTOR_BYTES, PEER_ACCESS, SEVERAL, of_batches
from overweave.schedules.records.record import MULTIPLIED_BY_ROWS, Margin, MethodRequest, Need


class Outside(Struct, frozen=True, kw_only=True):
    """One of them. curve: torch's all-reduce that sums, which machines' descriptions measure; empty: a fused operator.
    least_host_us: the least that a call costs the host, and so takes, however quick the GPU is; host_us: what three of
    four calls cost at most. host_steps: how many pieces the host launches, roughly. like: a method whose schedule is
    the same, by which a model predicts it; empty: none is.
    """

    name: str
    needs: tuple[Need, ...]
    margin: Margin
    curve: str = ""
    least_host_us: float = 0.0
    host_us: float = 0.0
    host_steps: int = 0
    like: str = ""


def _of(name: str, why_off_cuda: str) -> tuple[Need, ...]:
    """What all of them need."""

    def known(asked: MethodRequest) -> str:
        return "" if name in asked.problem.record.baselines else f"{name} is no {asked.problem.operator}"

    def on_cuda(asked: MethodRequest) -> str:
        return why_off_cuda if asked.device is not None and asked.device.kind != "cuda" else ""

    said = (Need("device", SEVERAL.why), Need("device", known), Need("device", on_cuda))
    return (*said, of_batches(MULTIPLIED_BY_ROWS[LIBRARY]), PEER_ACCESS, Need("device", _is_bare))


def _is_bare(asked: MethodRequest) -> str:
    return next((f"torch's operators do no {ending}" for ending in reversed(asked.problem.endings)), "")


def _equal_shards(asked: MethodRequest) -> str:
    ranks = asked.problem.world_size
    return f"torch's fused operators need rows that divide by {ranks}" if asked.problem.m % ranks else ""


def _summable(asked: MethodRequest) -> str:
    problem = asked.problem
    if problem.dtype not in ("bfloat16", "float32"):
        return "torch's own all-reduces need bf16 or fp32"
    step = DESCRIPTOR_BYTES // ITEMSIZE_BYTES[problem.dtype]
    return f"n={problem.n} must be a multiple of {step}: torch's all-reduces move 16 bytes" if problem.n % step else ""


# torch's own all-reduces stand behind the library path's matmul, cost the host less, and have measured times: how long
# the call is gives no reason for a margin. MEASURED: of the 82 rows of *.matmul_all_reduce.*.json the 43 in which
# torch's two-shot is predicted to gain more than 1 us are all quicker with it.
_MARGIN = Margin(1.0, 0.0)
TORCH_FUSED, TORCH_ONE_SHOT, TORCH_TWO_SHOT = "torch.fused", "torch.one_shot", "torch.two_shot"
_SUMS = "torch's all-reduces need CUDA"
OUTSIDE: dict[str, Outside] = {
    each.name: each
    for each in (
        Outside(
            name=TORCH_FUSED,
            needs=(*_of(TORCH_FUSED, "torch's fused operators need CUDA"), Need("device", _equal_shards)),
            margin=_MARGIN,
            # MEASURED: the rows of benchmarks/results, their least and their upper quartile
            # (tests/tuner/store/test_table.py).
            least_host_us=141.0,
            host_us=511.0,
            host_steps=64,
            like="per_shard",
        ),
        *(
            Outside(name=name, needs=(*_of(name, _SUMS), Need("device", _summable)), margin=_MARGIN, curve=curve)
            for name, curve in ((TORCH_ONE_SHOT, "one_shot_all_reduce"), (TORCH_TWO_SHOT, "two_shot_all_reduce"))
        ),
    )
}
