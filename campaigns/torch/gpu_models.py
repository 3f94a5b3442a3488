"""Does a Llama that a plan makes parallel compute on GPUs what one process does? Trained, and compiled.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_models [--steps 50] [--inductor test_micro_pipeline_tp.py]

trained: losses of AdamW on all ranks beside those of one process, within 1e-3, and again, bit for bit.
generated: 64 tokens in bf16 with a static cache, whose blocks run as a CUDA graph: the tokens of the same calls one by
one.
compiled: a layer by Inductor, forward and backward, whose eight collectives must all be overweave's.
inductor: PyTorch's own test of asynchronous tensor parallelism, whose text is carried along: with overweave installed
by the environment it fails nothing that passes without. It runs on rank 0, in a fake group.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import overweave as ow
from campaigns.gpu_ranks import Check, arguments, run_campaign
from campaigns.torch.small_llama import Llama, Sizes, loss_of, plan, unlike

SIZES = Sizes(vocabulary=256, width=512, inner=1024, heads=8, kv_heads=4, layers=2, has_biases=True)
BATCH, LENGTH, MOST_OFF = 2, 64, 1e-3
ENTRY_POINT = "[torch.backends]\noverweave = overweave:_on_torch_import\n"
PASSED = re.compile(r"^(\S+) PASSED", re.MULTILINE)


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    """Training and generation, a compiled layer, and PyTorch's test if its text is there."""
    yield from whole_models(asked.steps)
    for batch in (1, 2):
        yield Check(f"compiled: batch {batch}", partial(compiled, batch))
    if asked.inductor:
        yield Check("inductor: test_micro_pipeline_tp", partial(by_pytorch, asked.inductor))


def whole_models(steps: int) -> Iterator[Check]:
    """Training with and without sequence parallelism, and generation."""
    for is_split in (True, False):
        yield Check(f"trained: sequence {'split' if is_split else 'whole'}", partial(trained, is_split, steps))
    yield Check("generated: 64 tokens in a CUDA graph", generated)


def generated() -> Iterator[str]:
    """What is wrong with the tokens of a model on all ranks."""
    _, model = models(is_split=False, dtype=torch.bfloat16)
    return unlike(model, SIZES)


def models(is_split: bool, dtype: torch.dtype = torch.float32) -> tuple[Llama, Llama]:
    """A model in one process, and the same one on all ranks."""
    torch.manual_seed(0)
    single = Llama(SIZES).to("cuda", dtype)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = copy.deepcopy(single)
    parallelize_module(model, mesh, plan(SIZES.layers, is_split))
    return single, model


def losses(model: torch.nn.Module, steps: int) -> list[float]:
    """Of so many steps on sequences that count upwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    found = []
    for step in range(steps):
        start = torch.randint(SIZES.vocabulary - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + torch.arange(LENGTH)).cuda()
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def trained(is_split: bool, steps: int) -> Iterator[str]:
    """What is wrong with each step, and with the whole run when it is repeated."""
    (single, model), (_, again) = models(is_split), models(is_split)
    wanted, got, repeated = (losses(each, steps) for each in (single, model, again))
    for step, (one, every) in enumerate(zip(wanted, got, strict=True)):
        yield "" if abs(one - every) <= MOST_OFF * abs(one) else f"step {step}: loss {every}, not {one}"
    yield "" if got == repeated else "a second run has other bits"


def compiled(batch: int) -> Iterator[str]:
    """What is wrong with a compiled layer: results, gradients, collectives that are not overweave's."""
    single, model = models(is_split=True)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(batch, LENGTH, SIZES.width, generator=torch.Generator().manual_seed(batch)).cuda()
    own = x.chunk(ranks, 1)[rank].clone().requires_grad_()
    x.requires_grad_()
    names = ("gathers in compiled graphs", "sums in compiled graphs")
    ow.install(graphs=True)
    try:
        before = [fused(name) for name in names]
        torch._dynamo.reset()
        with config.patch(force_disable_caches=True):  # a graph from a cache has no pass run over it
            y = torch.compile(model.blocks[0], fullgraph=True, dynamic=False)(own)
            y.sum().backward()
        counts = [fused(name) - count for name, count in zip(names, before, strict=True)]
    finally:
        ow.uninstall()
    wanted = single.blocks[0](x)
    wanted.sum().backward()
    yield "" if torch.allclose(y, wanted.chunk(ranks, 1)[rank], atol=1e-3) else "other results"
    assert own.grad is not None
    assert x.grad is not None
    yield "" if torch.allclose(own.grad, x.grad.chunk(ranks, 1)[rank], atol=1e-2) else "another gradient"
    yield "" if counts == [4, 4] else f"{counts} of [4, 4] fused: {ow.report()}"


def fused(name: str) -> int:
    """How many collectives of a kind the pass has replaced in this process."""
    found = ow.report().operators.get(name)
    return 0 if found is None else found.by_overweave


def by_pytorch(file: str) -> Iterator[str]:
    """Tests of the file that pass without overweave, and fail where the environment installs it."""
    if dist.get_rank():
        return
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder, "overweave-0.0.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: overweave\nVersion: 0.0\n")
        (metadata / "entry_points.txt").write_text(ENTRY_POINT)
        plain, installed = (passed(file, folder, value) for value in ("0", "1"))
    if not plain:
        yield "no test passes without overweave"
    for test in sorted(plain):
        yield "" if test in installed else f"{test} fails with overweave installed"


def passed(file: str, folder: str, value: str) -> set[str]:
    """The tests of a file that pass in a process of their own. value: of OVERWEAVE_INSTALL."""
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: text for name, text in os.environ.items() if name not in ranks and not name.startswith("TORCHELASTIC")}
    path = os.pathsep.join((folder, str(Path.cwd()), str(Path(file).parent), env.get("PYTHONPATH", "")))
    env |= {"PYTHONPATH": path, "OVERWEAVE_INSTALL": value}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "addopts=", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)
    return {*PASSED.findall(done.stdout)}


def main() -> None:
    """Runs the campaign among the ranks that torchrun started."""
    parser = arguments(__doc__ or "", 300.0)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--inductor", default="", help="PyTorch's test_micro_pipeline_tp.py")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()
