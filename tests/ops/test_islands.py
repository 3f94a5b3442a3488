"""Groups of several islands: every plan whose rows the library moves is exact there, and no other one runs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import InputError, MachineError, OverweaveError, PeerDied, RankMismatch
from overweave.ir.exchange import NO_REACH
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import LIBRARY
from overweave.ir.problem import Problem
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
from overweave.schedules.methods.registry import methods_for
from overweave.schedules.records.record import Method
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
NAMED_WITHIN_S = 5.0


def words_of(method: Method) -> str:
    return f"{method.name} carrier={LIBRARY}" if method.takes("carrier") else method.name


def reaches_no_peer(method: Method) -> bool:
    return not method.addresses_peers({"carrier": LIBRARY} if method.takes("carrier") else {})


def plans(operator: str, is_asked: bool) -> list[str]:
    """Of an operator, the plans whose rows the library moves; or the others."""
    return [words_of(each) for each in methods_for(operator) if reaches_no_peer(each) is is_asked]


def given(operator: Operator, group: Group, seed: int = 0) -> dict[str, Any]:
    """Small whole numbers, so that every product and every sum of them is exact."""
    problem = Problem(operator=operator.name, m=M, n=N, k=K, world_size=group.world_size, dtype="float32")
    generator = torch.Generator().manual_seed(10 * seed + group.rank)
    shapes = {"x": (problem.operand_rows(group.rank), K), "w": (K, N)}
    return {name: torch.randint(-3, 4, shape, generator=generator).float() for name, shape in shapes.items()}


def reference(operator: Operator, group: Group, tensors: dict[str, Any]) -> torch.Tensor:
    y: torch.Tensor = operator.reference(tensors, PlainCollectives(group.process_group, M, 0))
    return y


def wrong_plans() -> list[str]:
    """The plans that are not exact, in two calls each, the second of which only announces itself."""
    group, wrong = resolve(None), []
    for name, operator in OPERATORS.items():
        for plan in (None, *plans(name, True)):
            for seed in range(2):
                tensors = given(operator, group, seed)
                y = call(operator, None, tensors | {"plan": plan})["y"]
                if not torch.equal(y, reference(operator, group, tensors)):
                    wrong.append(f"{name} by {plan}")
    return wrong


def with_one_rank_late() -> bool:
    """Whether calls stay right where the last rank comes later than a lost island is waited for."""
    group, operator = resolve(None), OPERATORS["matmul_all_reduce"]
    right = []
    for seed in range(3):
        if seed and group.rank == group.world_size - 1:
            time.sleep(LOST_AFTER_S + 0.5 if seed == 1 else 0.1)
        tensors = given(operator, group, seed)
        right.append(torch.equal(call(operator, None, tensors)["y"], reference(operator, group, tensors)))
    return all(right)


def test_a_rank_may_be_late():
    assert run_ranks(on_islands, 3, "aab", with_one_rank_late) == [True] * 3


@pytest.mark.parametrize("names", GROUPS)
def test_plans_whose_rows_the_library_moves_are_exact(names: str):
    found = run_ranks(on_islands, len(names), names, wrong_plans, timeout_s=TIMEOUT_S)
    assert found == [[]] * len(names)


def test_every_operator_has_such_plans_and_others():
    assert all(len(plans(name, True)) >= 1 <= len(plans(name, False)) for name in OPERATORS)
    assert any("carrier" in plan for plan in plans("all_gather_matmul", True))


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
        for plan in plans(name, False):
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


def gradients() -> list[list[float]]:
    """Those of x and of w, operator by operator."""
    group, found = resolve(None), []
    for name, operator in OPERATORS.items():
        passed = {at: each.requires_grad_() for at, each in given(operator, group).items()}
        y = getattr(ow, name)(passed["x"], passed["w"])
        generator = torch.Generator().manual_seed(0 if operator.shares_sums else group.rank)
        y.backward(torch.randint(-2, 3, y.shape, generator=generator).float())
        found += [each.grad.flatten().tolist() for each in passed.values()]
    return found


@pytest.mark.parametrize("names", ["aabb", "aab"])
def test_gradients_are_those_of_one_island(names: str):
    apart, together = (
        run_ranks(on_islands, len(names), each, gradients, timeout_s=TIMEOUT_S) for each in (names, "a" * len(names))
    )
    assert apart == together
    assert all(any(numbers) for rank in apart for numbers in rank)


def calls_until(began: str, is_odd: bool) -> list[object]:
    """Calls that ranks have agreed on, until one raises. is_odd: the last rank makes others than the rest."""
    group = resolve(None)
    own = {activation: given(OPERATORS["all_gather_matmul"], group) for activation in ("silu", None)}

    def made(activation: str | None) -> None:
        ow.all_gather_matmul(own[activation]["x"], own[activation]["w"], activation=activation)

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


def named_calls(names: str, began: str) -> list[object]:
    found: list[object] = on_islands(names, calls_until, began, False)
    return found


@pytest.mark.parametrize(("names", "killed"), [("aabb", (2, 3)), ("aaab", (1,)), ("ab", (0,))])
def test_a_rank_or_a_host_that_dies_in_a_call_is_named_in_time(names: str, killed: tuple[int, ...], tmp_path: Path):
    survivors = [rank for rank in range(len(names)) if rank not in killed]
    with RankProcesses(named_calls, len(names), names, str(tmp_path), group_timeout_s=60.0) as ranks:
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
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
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
    assert "y [256, 96], z [64, 128] on 4 ranks" in printed[0]
    assert all("ranks 0-1 on " in each and " and ranks 2-3 on " in each for each in printed)
