"""Groups of several islands: plans whose rows cross by the library alone are exact, and no other one runs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import plans_by_island
from overweave.errors import InputError, MachineError, OverweaveError, PeerDied, RankMismatch
from overweave.ir.exchange import NO_REACH
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.memory.board import between_islands
from overweave.memory.board.between_islands import LOST_AFTER_S
from overweave.memory.board.islands import Islands
from overweave.memory.board.records import ISLAND
from overweave.memory.group import Group, resolve
from overweave.ops import workspace
from overweave.ops.call.prepared import calls_of
from overweave.ops.dispatch.call import call
from overweave.ops.reference import PlainCollectives
from overweave.runtime import diagnosis
from overweave.runtime.host.processes import RankProcesses, die_with_parent
from overweave.tuner.space.target import Target, target_of
from tests.clock import slowness
from tests.docs.blocks import blocks
from tests.islands import on_islands
from tests.ranks import run_ranks
from tests.scripts import environment_of
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow

M, N, K = 48, 24, 16
GROUPS = ("ab", "aab", "aabb", "aaab", "abab", "abc", "aabbcc")
TIMEOUT_S = 120.0
NAMED_WITHIN_S, SOON_LOST_S = 5.0, 1.0


def given(operator: Operator, group: Group, seed: int = 0, rows: int = M) -> dict[str, Any]:
    """Small whole numbers, so that every product and every sum of them is exact."""
    m = operator.whole_rows(rows, group.world_size)
    problem = Problem(operator=operator.name, m=m, n=N, k=K, world_size=group.world_size, dtype="float32")
    generator = torch.Generator().manual_seed(10 * seed + group.rank)
    shapes = {"x": (problem.operand_rows(group.rank), K), "w": (K, N)}
    return {name: torch.randint(-3, 4, shape, generator=generator).float() for name, shape in shapes.items()}


def reference(operator: Operator, group: Group, tensors: dict[str, Any], rows: int = M) -> torch.Tensor:
    m = operator.whole_rows(rows, group.world_size)
    y: torch.Tensor = operator.reference(tensors, PlainCollectives(group.process_group, m, 0))
    return y


def wrong_plans() -> list[str]:
    """The plans that are not exact, in two calls each, the second of which only announces itself."""
    group, wrong = resolve(None), []
    for name, operator in OPERATORS.items():
        for plan in (None, *plans_by_island(name)):
            for seed in range(2):
                tensors = given(operator, group, seed)
                y = call(operator, None, tensors | {"plan": plan})["y"]
                if not torch.equal(y, reference(operator, group, tensors)):
                    wrong.append(f"{name} by {plan}")
    return wrong


def wrong_rows() -> list[str]:
    """The rows and operators of which two levels are not exact: fewer rows than ranks, and shards of unlike heights."""
    group, wrong = resolve(None), []
    for rows, (name, operator) in product((1, 13), OPERATORS.items()):
        tensors = given(operator, group, rows=rows)
        extent = {"m": rows} if operator.has_row_shards else {}
        y = call(operator, None, tensors | extent | {"plan": "islands"})["y"]
        if not torch.equal(y, reference(operator, group, tensors, rows)):
            wrong.append(f"{rows} rows of {name}")
    return wrong


@pytest.mark.parametrize("names", ["aab", "abab"])
def test_two_levels_are_exact_of_any_rows(names: str):
    assert run_ranks(on_islands, len(names), names, wrong_rows, timeout_s=TIMEOUT_S) == [[]] * len(names)


def with_one_rank_late(plan: str | None) -> bool:
    """Whether calls stay right where the last rank comes later than a lost island is waited for."""
    group, operator = resolve(None), OPERATORS["matmul_all_reduce"]
    right = []
    with patch.object(between_islands, "LOST_AFTER_S", SOON_LOST_S):
        for seed in range(3):
            if seed and group.rank == group.world_size - 1:
                time.sleep(SOON_LOST_S + 0.5 if seed == 1 else 0.1)
            tensors = given(operator, group, seed)
            y = call(operator, None, tensors | {"plan": plan})["y"]
            right.append(torch.equal(y, reference(operator, group, tensors)))
    return all(right)


@pytest.mark.parametrize("plan", [None, "islands"])
def test_a_rank_may_be_late(plan: str | None):
    assert run_ranks(on_islands, 3, "aab", with_one_rank_late, plan) == [True] * 3


@pytest.mark.parametrize(
    "names", [*GROUPS[::2], *(pytest.param(each, marks=pytest.mark.nightly) for each in GROUPS[1::2])]
)
def test_plans_that_reach_no_other_island_are_exact(names: str):
    found = run_ranks(on_islands, len(names), names, wrong_plans, timeout_s=TIMEOUT_S)
    assert found == [[]] * len(names)


def test_every_operator_has_such_plans_and_others():
    assert all(len(plans_by_island(name)) >= 1 <= len(plans_by_island(name, False)) for name in OPERATORS)
    assert any("carrier" in plan for plan in plans_by_island("all_gather_matmul"))
    assert all(any("islands" in plan for plan in plans_by_island(name)) for name in OPERATORS)


def taken() -> dict[str, str]:
    """What runs where no plan is asked for, and why."""
    group = resolve(None)
    for operator in OPERATORS.values():
        call(operator, None, given(operator, group))
    return {
        each.operation: f"{each.choice.text}: {each.choice.reason}" for each in calls_of(group).of_operators.values()
    }


def test_the_choice_is_the_library_path_and_says_why():
    for found in run_ranks(on_islands, 2, "ab", taken):
        assert found.keys() == OPERATORS.keys()
        assert all("sequential: rank 0 on a and rank 1 on b are several islands" in each for each in found.values())


def refusals() -> list[tuple[str, str]]:
    """Of every plan that moves rows itself, the type and the words of what is raised."""
    group, raised = resolve(None), []
    for name, operator in OPERATORS.items():
        crossing = ["islands carrier=copy_engine"] if name == "all_gather_matmul" else []
        for plan in (*plans_by_island(name, False), *crossing):
            with pytest.raises(OverweaveError) as caught:
                call(operator, None, given(operator, group) | {"plan": plan})
            raised.append((type(caught.value).__name__, str(caught.value)))
    return raised


def test_plans_that_address_peers_are_refused_on_every_rank_with_the_reason():
    for found in run_ranks(on_islands, 3, "aab", refusals):
        assert {kind for kind, _ in found} == {InputError.__name__}
        assert all(f"ranks 0-1 on a and rank 2 on b {NO_REACH}" in text for _, text in found), found


def program() -> str:
    with pytest.raises(MachineError) as caught:
        ow.TileProgram({"kept": ow.SymmetricBuffer(16, 16, torch.float32)}, {}, None, torch.device("cpu"), False)
    return str(caught.value)


def test_a_tile_program_is_refused_before_it_runs():
    assert all(NO_REACH in each for each in run_ranks(on_islands, 2, "ab", program))


def gradients(plan: str | None) -> list[list[float]]:
    """Those of x and of w, operator by operator."""
    group, found = resolve(None), []
    for name, operator in OPERATORS.items():
        passed = {at: each.requires_grad_() for at, each in given(operator, group).items()}
        y = getattr(ow, name)(passed["x"], passed["w"], plan=plan)
        generator = torch.Generator().manual_seed(0 if operator.shares_sums else group.rank)
        y.backward(torch.randint(-2, 3, y.shape, generator=generator).float())
        found += [each.grad.flatten().tolist() for each in passed.values()]
    return found


@pytest.mark.parametrize(("names", "plan"), [("aabb", None), ("aab", None), ("aabb", "islands")])
def test_gradients_are_those_of_one_island(names: str, plan: str | None):
    apart, together = (
        run_ranks(on_islands, len(names), each, gradients, by, timeout_s=TIMEOUT_S)
        for each, by in ((names, plan), ("a" * len(names), None))
    )
    assert apart == together
    assert all(any(numbers) for rank in apart for numbers in rank)


def step_on_a_mesh() -> list[object]:
    """A layer's step on [data, tensor]: rows are gathered by pushes among the ranks of a host, and the gradient of the
    weight is summed across hosts, on two levels. What islands both groups have, and whether both are exact."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    of_tensor, of_data, right = mesh["tensor"], mesh["data"], []
    gather, scatter = OPERATORS["all_gather_matmul"], OPERATORS["matmul_reduce_scatter"]
    for seed in range(2):
        own = given(gather, resolve(of_tensor), seed + dist.get_rank())
        y = ow.all_gather_matmul(own["x"], own["w"], of_tensor, plan="push")
        right.append(torch.equal(y, reference(gather, resolve(of_tensor), own)))
        grad = {"x": own["x"].t().contiguous(), "w": torch.randint(-3, 4, (own["x"].shape[0], N)).float()}
        shard = ow.matmul_reduce_scatter(grad["x"], grad["w"], of_data, plan="islands")
        right.append(torch.equal(shard, reference(scatter, resolve(of_data), grad, K)))
    return [len(ow.islands(of_tensor).members), len(ow.islands(of_data).members), right]


def test_a_mesh_has_tensor_groups_on_hosts_and_data_groups_across():
    assert run_ranks(on_islands, 4, "aabb", step_on_a_mesh) == [[1, 2, [True] * 4]] * 4


def calls_until(began: str, is_odd: bool, plan: str | None = None) -> list[object]:
    """Calls that ranks have agreed on, until one raises. is_odd: the last rank makes others than the rest."""
    group = resolve(None)
    own = {activation: given(OPERATORS["all_gather_matmul"], group) for activation in ("silu", None)}

    def made(activation: str | None) -> None:
        ow.all_gather_matmul(own[activation]["x"], own[activation]["w"], activation=activation, plan=plan)

    made("silu")
    made(None)
    dist.barrier()
    Path(began, str(group.rank)).touch()
    is_odd = is_odd and group.rank == group.world_size - 1

    def for_ever() -> None:
        while True:
            made("silu" if is_odd else None)

    with pytest.raises(OverweaveError) as caught:
        for_ever()
    return [type(caught.value).__name__, str(caught.value), time.monotonic()]


def test_calls_of_known_signatures_that_differ_are_named(tmp_path: Path):
    start_s = time.monotonic()
    for kind, text, raised_s in run_ranks(on_islands, 3, "aab", calls_until, str(tmp_path), True):
        assert kind == RankMismatch.__name__
        assert "rank 2 on b asks for" in text
        assert "silu" in text
        assert raised_s - start_s < 2 * NAMED_WITHIN_S * slowness()  # of forks and calls that agree, too


def named_calls(names: str, began: str, plan: str | None, lost_after_s: float) -> list[object]:
    with patch.object(between_islands, "LOST_AFTER_S", lost_after_s):
        found: list[object] = on_islands(names, calls_until, began, False, plan)
    return found


@pytest.mark.parametrize(
    ("names", "killed", "plan", "lost_after_s"),
    [
        ("aabb", (2, 3), None, LOST_AFTER_S),
        ("aaab", (1,), None, LOST_AFTER_S),
        ("ab", (0,), None, SOON_LOST_S),
        ("aabb", (2, 3), "islands", SOON_LOST_S),
        ("aab", (1,), "islands", SOON_LOST_S),
    ],
)
def test_a_rank_or_a_host_that_dies_in_a_call_is_named_in_time(
    names: str, killed: tuple[int, ...], plan: str | None, lost_after_s: float, tmp_path: Path
):
    survivors = [rank for rank in range(len(names)) if rank not in killed]
    told = names, str(tmp_path), plan, lost_after_s
    with RankProcesses(named_calls, len(names), *told, group_timeout_s=60.0) as ranks:
        end_s = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < len(names):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        struck_s = time.monotonic()
        ranks.kill(*killed)
        for outcome in ranks.wait(30, *survivors):
            assert not outcome.error, outcome.message
            kind, text, raised_s = outcome.value
            assert kind == PeerDied.__name__
            assert any(f"rank {rank} on {names[rank]} died" in text for rank in killed), text
            assert raised_s - struck_s < NAMED_WITHIN_S * slowness()


def test_a_gpu_that_waits_for_a_lost_peer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    never = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: never)
    lost = PeerDied("call 7", "rank 1 on b died", "")

    def check() -> None:
        raise lost

    board: Any = SimpleNamespace(islands=Islands(((0,), (1,)), ("a", "b")), check_periodically=check)
    with pytest.raises(PeerDied):
        workspace._await_gpu(board)


def known_targets() -> list[object]:
    target = target_of(torch.device("cpu"), resolve(None))
    return [target.peer_access, target.parted, target.device(2)]


def test_measurements_are_kept_apart():
    parted, whole = (run_ranks(on_islands, 2, names, known_targets)[0] for names in ("ab", "aa"))
    assert whole == [True, "", Target("cpu").device(2)]
    assert parted == [False, "rank 0 on a and rank 1 on b", "cpu, several islands"]


def doctors_finding(port: int) -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= environment_of(rank, ranks, port)
    found = diagnosis._islands()
    return [found.status, found.found]


@pytest.mark.parametrize(
    ("names", "status", "text"),
    [("ab", "note", "rank 0 on a and rank 1 on b: between them"), ("aa", "ok", "ranks 0-1 on a")],
)
def test_doctor_shows_the_islands_of_the_ranks_of_torchrun(names: str, status: str, text: str):
    for found in run_ranks(on_islands, 2, names, doctors_finding, free_port()):
        assert found[0] == status
        assert found[1].startswith(text)


def test_doctor_says_alone_what_will_be_an_island(monkeypatch: pytest.MonkeyPatch):
    assert diagnosis._islands().status == "ok"
    monkeypatch.setenv(ISLAND, "odd")
    assert diagnosis._islands().found.startswith(f"{ISLAND}=odd")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def other_host() -> tuple[list[str], dict[str, str]]:
    """How a process starts that sees no process of this host: as in another container, or else by what it is told."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which(alone[0]) and not subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        return alone, {}
    return [], {ISLAND: "other"}


def test_the_readmes_program_runs_on_two_hosts_of_torchrun(tmp_path: Path):
    (program,) = (each for each in blocks() if each.page.name == "README.md")
    code = program.code.replace("dist.destroy_process_group()", "print(ow.islands())\ndist.destroy_process_group()")
    (tmp_path / "first.py").write_text(code)
    port, (alone, variables) = free_port(), other_host()
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launch += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    hosts = [
        subprocess.Popen(
            [*before, *launch, f"--node-rank={rank}", str(tmp_path / "first.py")],
            env=environment | told,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        for rank, (before, told) in enumerate([([], {}), (alone, variables)])
    ]
    try:
        printed = [host.communicate(timeout=120 * slowness())[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert "y [128, 96], z [64, 128] on 2 ranks" in printed[0]
    assert all("rank 0 on " in each and " and rank 1 on " in each for each in printed)
