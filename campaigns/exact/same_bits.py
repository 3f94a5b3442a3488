"""Does a commit compute the same bits as another one? Every plan that both have, on the same data, in one run.

    python -m campaigns.same_bits OLD_CHECKOUT [--world 2 4] [--only TEXT] [--out FILE]

Each checkout computes all cases in processes of its own: emulated CPU ranks, or, where there is a GPU, ranks that share
it. Tile shapes are named, so that no table decides. A case's results are held as digests of their bytes, rank by rank;
integers and floats must have the same digests in both. A plan that one of the checkouts refuses is listed with its
reason. This file runs in both checkouts, so it uses public names of the package alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

N, K = 64, 32
ROWS = (1, 37, 200)
TILES = "block_m=16 block_n=32 block_k=32"
GPU_TILES = "block_m=128 block_n=128 block_k=64"
# {tiles} stands for the tile shape of the machine.
PLANS = {
    "all_gather_matmul": (
        "sequential", "per_shard", "per_shard order=all_peers", "push {tiles}", "push order=all_peers pieces=3 {tiles}",
        "pull {tiles}", "pull pieces=3 order=all_peers {tiles}", "mesh pieces=2 {tiles}", "ring pieces=2 {tiles}",
        "double_ring {tiles}", "islands island=1 {tiles}", "gather_packed",
    ),
    "matmul_reduce_scatter": (
        "sequential", "per_shard", "scatter {tiles}", "scatter pieces=2 own_pieces=1 order=all_peers {tiles}",
        "scatter sums=epilogue pieces=3 {tiles}", "scatter_stored {tiles}", "scatter_stored pieces=3 {tiles}",
        "ring_stored pieces=2 {tiles}", "scatter_pull pieces=2 {tiles}", "scatter_packed",
        "fused_ring pieces=2 {tiles}",
    ),
    "matmul_all_reduce": (
        "sequential", "one_shot_packed", "two_shot_packed", "two_shot {tiles}", "two_shot pieces=3 {tiles}",
        "two_shot sums=epilogue pieces=2 {tiles}", "ring_stored pieces=2 {tiles}",
    ),
}  # fmt: skip
ENDINGS = ("", "bias silu residual")
GATED = "gate"
DEADLINE_S = 60.0


class Case(NamedTuple):
    """A call: its operator, plan and rows, the dtype of its operands, what follows the product, and its data."""

    operator: str
    plan: str
    m: int
    dtype: str
    ending: str
    is_integer: bool

    def __str__(self) -> str:
        data = "integers" if self.is_integer else "floats"
        return f"{self.operator}.{self.plan} m={self.m} {self.dtype} {self.ending or 'plain'} {data}"


def cases(tiles: str, text: str = "") -> Iterator[Case]:
    """The case matrix, less the cases without `text` in their name."""
    for operator, plans in PLANS.items():
        endings = (*ENDINGS, GATED) if operator == "all_gather_matmul" else ENDINGS
        for plan in plans:
            for m in ROWS:
                for dtype, ending, is_integer in (
                    *(("bfloat16", ending, False) for ending in endings),
                    ("bfloat16", "", True),
                    ("float32", "", False),
                ):
                    case = Case(operator, plan.format(tiles=tiles), m, dtype, ending, is_integer)
                    if text in str(case):
                        yield case


def digest_of(case: Case, device: torch.device) -> str:
    """Of this rank's result."""
    import overweave as ow

    rank, size = dist.get_rank(), dist.get_world_size()

    def made(rows: int, cols: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if case.is_integer:
            whole = torch.randint(-1, 2, (rows, cols), generator=generator).float()
        else:
            whole = torch.randn(rows, cols, generator=generator)
        return whole.to(device, getattr(torch, case.dtype))

    gathers = case.operator == "all_gather_matmul"
    x, w = made(case.m, K, 1 if gathers else 1 + rank), made(K, N, 100 + rank)
    shard = -(-case.m // size)
    own = slice(min(rank * shard, case.m), min((rank + 1) * shard, case.m))
    beside: dict[str, Any] = {}
    if case.ending == GATED:
        beside = {"gate": made(K, N, 200 + rank), "activation": "silu"}
    elif case.ending:
        residual = made(case.m, N, 400)
        residual = residual[own].clone() if case.operator == "matmul_reduce_scatter" else residual
        beside = {"bias": made(1, N, 300)[0], "activation": "silu", "residual": residual}
    if beside and hasattr(ow, "Extras"):  # a checkout from before keywords
        beside = {"extras": getattr(ow, "Extras")(**beside)}  # noqa: B009
    call = getattr(ow, case.operator)
    given = {"m": case.m} if gathers else {}
    y = call(x[own].clone() if gathers else x, w, **beside, plan=case.plan, **given)
    return hashlib.sha256(y.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _rank(rank: int, size: int, folder: str, text: str) -> None:
    """One rank of one checkout: all cases, its digests in a file."""
    torch.set_num_threads(1)
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.device_count() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE_S))
    told: dict[str, str] = {}
    with torch.no_grad():
        for case in cases(GPU_TILES if device.type == "cuda" else TILES, text):
            try:
                told[str(case)] = digest_of(case, device)
            except Exception as error:  # noqa: BLE001 - what a checkout refuses is a result
                told[str(case)] = f"refused: {error}"[:200]
                if "InputError" not in type(error).__name__:
                    traceback.print_exc()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def digests(checkout: Path, size: int, text: str) -> list[dict[str, str]]:
    """Of every rank, by case, as a checkout computes them in a process of its own."""
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        paths = [str(checkout), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)[1:])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "OVERWEAVE_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--ranks", str(size), "--folder", folder, "--only", text]
        subprocess.run(command, cwd=checkout, env=os.environ | shared | own, check=True)
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(size)]


def compared(old: list[dict[str, str]], new: list[dict[str, str]]) -> tuple[list[str], dict[str, str], int]:
    """Cases that differ, cases that only one of both computes with the reason, and how many are the same."""
    differing: list[str] = []
    missing: dict[str, str] = {}
    same = 0
    for case in old[0]:
        pairs = [(was[case], now[case]) for was, now in zip(old, new, strict=True)]
        refused = [("old " if was.startswith("refused") else "new ") + max(was, now, key=len) for was, now in pairs
                   if was.startswith("refused") != now.startswith("refused")]  # fmt: skip
        if refused:
            missing[case] = refused[0]
        elif any(was != now for was, now in pairs if not was.startswith("refused")):
            differing.append(case)
        else:
            same += not pairs[0][0].startswith("refused")
    return differing, missing, same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", type=Path)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.ranks:
        how = "spawn" if torch.cuda.is_available() else "fork"  # no CUDA context survives a fork
        mp.start_processes(_rank, (asked.ranks, asked.folder, asked.only), asked.ranks, start_method=how)
        return 0
    if asked.old is None or not (asked.old / "overweave").is_dir():
        parser.error("give the root of another checkout of this repository")
    lines: list[str] = []
    failed = 0
    for size in asked.world:
        checkouts = asked.old.resolve(), Path(__file__).resolve().parents[2]
        differing, missing, same = compared(*(digests(root, size, asked.only) for root in checkouts))
        failed += len(differing)
        counts = f"{same} cases have the same bits, {len(differing)} differ, {len(missing)} are of one alone"
        lines += [f"W={size}: {counts}", *(f"  differs: {case}" for case in differing)]
        lines += [f"  one alone: {case}: {why}" for case, why in missing.items()]
    print(*lines, sep="\n")
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
