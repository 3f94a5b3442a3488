"""`install` on CPU ranks: torch's fused operators answered by overweave, in torch's values, strides and gradients."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.distributed.nn.functional import all_gather, all_reduce

import overweave as ow
from campaigns.torch.fused_calls import GATHER, SCALED_GATHER, SCATTER, Fused, difference, fused_calls, taken_by_torch
from overweave.errors import InputError
from tests.ranks import run_ranks
from tests.source_tree import ROOT, python_path

LEAST_CASES = 60


def differences() -> list[str]:
    """For `run_ranks`: in what the answers of an installed overweave differ from torch's, and calls not counted."""
    calls = list(fused_calls(dist.get_world_size()))
    assert len(calls) >= LEAST_CASES
    ow.install(strict=True)
    try:
        before = answered_by_overweave()
        found = [told for call in calls if (told := difference(call))]
        uncounted = len(calls) - (answered_by_overweave() - before)
        return found + [f"{uncounted} calls were not counted"] * bool(uncounted)
    finally:
        ow.uninstall()


def answered_by_overweave() -> int:
    return sum(site.by_overweave for site in ow.report().operators.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_results_are_torchs(world_size: int):
    assert run_ranks(differences, world_size) == [[]] * world_size


def left_to_torch() -> list[str]:
    ow.install()
    try:
        found = []
        for call, word in taken_by_torch(dist.get_world_size()):
            by_torch = ow.report().operators.get(call.name)
            before = by_torch.by_torch.copy() if by_torch else {}
            found += [told] if (told := difference(call)) else []
            counted = ow.report().operators[call.name].by_torch
            reasons = [reason for reason, count in counted.items() if count > dict(before).get(reason, 0)]
            found += [] if [word in reason for reason in reasons] == [True] else [f"{call}: {reasons}, not {word}"]
        return found
    finally:
        ow.uninstall()


def refused_where_strict() -> list[str]:
    ow.install(strict=True)
    try:
        found = []
        for call, word in taken_by_torch(dist.get_world_size()):
            with pytest.raises(InputError, match=word):
                call.answered()
        with torch_symm_mem._test_mode():  # torch's own switch stays torch's
            found += [told] if (told := difference(Fused(GATHER, (2, 16), 0))) else []
        return found
    finally:
        ow.uninstall()


def test_what_overweave_does_not_take_is_torchs():
    assert run_ranks(left_to_torch, 2) == [[]] * 2
    assert run_ranks(refused_where_strict, 2) == [[]] * 2


def gradients() -> list[str]:
    """Of both operators, held against torch's plain answers, which are differentiable."""
    ow.install(strict=True)
    try:
        ranks = dist.get_world_size()
        found = []
        for call in (
            Fused(GATHER, (2, 3, 16), 1, (8, 4)),
            Fused(GATHER, (3, 16), 0, (8,), option="products"),
            Fused(SCATTER, (2, 2 * ranks, 16), 1),
            Fused(SCATTER, (2 * ranks, 16), 0, option="avg"),
        ):
            ours, truth = (gradients_of(call, by) for by in (call.name, f"_{call.name}_fallback"))
            same = [torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, truth, strict=True)]
            found += [] if all(same) else [f"{call}: {same}"]
        return found
    finally:
        ow.uninstall()


def gradients_of(call: Fused, by: str) -> list[torch.Tensor]:
    """Of all operands, where every element of every result has a weight of its own. by: an operator, or a fallback.

    torch's collectives have gradients only as functions of torch.distributed.nn, so the truth is computed from them.
    """
    arguments, options = call.arguments()
    leaves = [arguments[0], *(arguments[1] if isinstance(arguments[1], list) else [arguments[1]])]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    weights = leaves[1:] if call.name == GATHER else leaves[1]
    if by == call.name:
        results = getattr(torch.ops.symm_mem, by)(leaves[0], weights, *arguments[2:], **options)
        results = [results[0], *results[1]] if call.name == GATHER else [results]
    else:
        results = in_plain_torch(call, leaves)
    sums = [(each * torch.arange(each.numel()).reshape(each.shape)).sum() for each in results if each is not None]
    torch.stack(sums).sum().backward()
    return [leaf.grad for leaf in leaves]


def in_plain_torch(call: Fused, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    group = dist.group.WORLD
    if call.name == GATHER:
        gathered = torch.cat(all_gather(leaves[0], group), call.dim)
        return [gathered if call.option != "products" else None, *(gathered @ b for b in leaves[1:])]
    total = all_reduce(leaves[0] @ leaves[1], group=group) / (dist.get_world_size() if call.option == "avg" else 1)
    return [total.chunk(dist.get_world_size(), call.dim)[dist.get_rank()]]


@pytest.mark.slow
def test_gradients():
    assert run_ranks(gradients, 2) == [[]] * 2


def scaled_gradient() -> str:
    ow.install(strict=True)
    try:
        call = Fused(SCALED_GATHER, (4, 16), 0, dtype=torch.float8_e4m3fn, option="bias")
        arguments, _ = call.arguments()
        arguments[6][0] = arguments[6][0].requires_grad_()
        _, (y,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(*arguments)
        try:
            y.sum().backward()
        except InputError as error:
            return str(error)
        return "differentiated"
    finally:
        ow.uninstall()


def test_scaled_operators_refuse_to_be_differentiated():
    assert all("has no gradient" in told for told in run_ranks(scaled_gradient, 2))


def compiled_as_eager() -> list[str]:
    ow.install(strict=True)
    try:
        group, found = dist.group.WORLD.group_name, []
        b = torch.randn(16, 8)

        def block(a: torch.Tensor) -> torch.Tensor:
            _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 1, group)
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(y.relu(), b.t(), "sum", 1, group) + 1

        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
        for batch in (1, 2):
            a = torch.randn(batch, 4, 16, requires_grad=True)
            eager, other = block(a), compiled(a)
            found += [] if torch.allclose(eager, other, atol=1e-5) else [f"batch {batch}: values"]
            found += [] if eager.stride() == other.stride() else [f"batch {batch}: strides"]
            grads = [torch.autograd.grad(each.sum(), a)[0] for each in (eager, other)]
            found += [] if torch.allclose(*grads, atol=1e-4) else [f"batch {batch}: gradients"]
        return found
    finally:
        ow.uninstall()


@pytest.mark.slow
def test_compiled_calls_equal_eager_ones():
    assert run_ranks(compiled_as_eager, 2) == [[]] * 2


def installed_and_not() -> list[str]:
    """Who answers before, between and after; and what cannot be done."""
    call, told = Fused(GATHER, (2, 16), 0), []
    for _ in range(2):
        with pytest.raises(NotImplementedError):  # torch has no kernel for CPUs
            call.answered()
        ow.install()
        with pytest.raises(InputError, match="installed already"):
            ow.install()
        told += [difference(call)]
        ow.uninstall()
    with pytest.raises(InputError, match="not installed"):
        ow.uninstall()
    return [each for each in told if each]


@pytest.mark.bad
def test_install_and_uninstall():
    assert run_ranks(installed_and_not, 2) == [[]] * 2


def replaced_meanwhile() -> str:
    ow.install()
    other = torch.library.Library("symm_mem", "IMPL")
    try:
        other.impl(SCATTER, lambda *_: torch.zeros(7), "CPU", allow_override=True)
        zeros = Fused(SCATTER, (4, 16), 0).answered()[0]
        with pytest.raises(InputError, match="Take that registration back first"):
            ow.uninstall()
        return f"{zeros.shape[0]} {ow.report()}"
    finally:
        other._destroy()
        ow.uninstall()


@pytest.mark.bad
def test_kernels_that_others_put_over_it_are_reported():
    for told in run_ranks(replaced_meanwhile, 1):
        assert told.startswith("7 ")
        assert f"symm_mem::{SCATTER} on CPU: answered by a kernel registered at" in told


PROGRAM = """
import torch, sys
print("overweave.adapters.symm_mem.install" in sys.modules)
import overweave
print(overweave.report().is_installed)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "wanted"),
    [("strict,graphs", ["True", "True"]), pytest.param("0", ["False", "False"], marks=pytest.mark.nightly)],
)
def test_the_environment_installs_in_programs_that_nobody_edits(value: str, wanted: list[str], tmp_path):
    """As an installed package does: torch reads the entry points of its metadata."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "overweave-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: overweave\nVersion: 0.0\n")
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in each.items()) for group, each in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path), "OVERWEAVE_INSTALL": value}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == wanted
