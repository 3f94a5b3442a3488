"""The emulation at library depth: every schedule computes what it says, and a schedule that lies is found out."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
import torch

from campaigns.exact.calls import Case
from campaigns.exact.exactness import compute, make_data
from overweave.errors import PeerTimeout, WorkspaceBroken
from overweave.ir.plan import Plan
from overweave.ir.schedule import Copy
from overweave.memory.group import resolve
from overweave.memory.host.workspace import HostWorkspace
from overweave.runtime.host.host import run_on_host
from tests.clock import slowness
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def plan_of(name: str, world_size: int) -> Plan:
    return Case("all_gather_matmul", 48, 24, 16, plan=name).built(world_size)


def changed(plan: Plan, **changes: Any) -> Plan:
    return msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, **changes))


def without_waits(plan: Plan) -> Plan:
    operations = plan.schedule.operations
    return changed(plan, operations=tuple(msgspec.structs.replace(operation, waits=()) for operation in operations))


def run_without_waits() -> int:
    """How many of 50 results are wrong when nobody waits and the others are late."""
    group, chance = resolve(None), random.Random(1)
    plan = without_waits(plan_of("push", group.world_size))
    wrong = 0
    for call in range(50):
        data = make_data(plan.problem, group.rank, call)
        if chance.randrange(group.world_size) == group.rank:
            time.sleep(2e-3)
        wrong += not torch.equal(compute(plan, group, data, "library"), data.exact.bfloat16())
    return wrong


def test_a_missing_wait_is_seen():
    """Signals are real: without waits results are wrong."""
    assert sum(run_ranks(run_without_waits, 2)) > 0


def without_a_signal(plan: Plan, name: str) -> Plan:
    """Rank 1 forgets to announce one push."""
    operations = plan.schedule.operations
    return changed(
        plan,
        operations=tuple(
            msgspec.structs.replace(operation, notifies=()) if operation.name == name else operation
            for operation in operations
        ),
    )


def miss_a_signal() -> dict[str, Any]:
    group = resolve(None)
    plan = plan_of("push", group.world_size)
    pushes = [op.name for op in plan.schedule.of_rank(1) if op.name.startswith("push") and op.notifies]
    broken = without_a_signal(plan, pushes[-1])
    data, output = make_data(plan.problem, group.rank, 0), torch.zeros(48, 24, dtype=torch.bfloat16)
    inputs, start_s = {"x": data.x, "w": data.w}, time.monotonic()
    told: dict[str, Any] = {}
    try:
        run_on_host(broken, group, inputs, {"y": output}, timeout_s=0.3)
        time.sleep(1)
        run_on_host(plan, group, inputs, {"y": output}, timeout_s=0.3)
    except PeerTimeout as error:
        told = {"text": str(error), "took_s": time.monotonic() - start_s, "is_void": bool(output.isnan().all())}
    with pytest.raises(WorkspaceBroken):
        run_on_host(plan, group, inputs, {"y": output})
    workspace = HostWorkspace.of(group)
    workspace.board.reset(workspace.reset_local, 5.0)
    told["is_mended"] = torch.equal(compute(plan, group, data, "library"), data.exact.bfloat16())
    return told


@pytest.mark.slow
def test_a_missing_signal_is_a_timeout_then_void_then_mended():
    for told in run_ranks(miss_a_signal, 2, timeout_s=20):
        assert "multiply" in told["text"]
        assert "arrived" in told["text"]
        assert "a peer is late" in told["text"]  # the broken plan names nobody who owes the signal
        assert told["took_s"] < 0.3 + 2.0 * slowness()
        assert told["is_void"]
        assert told["is_mended"]


def run_with_a_delay(delay_us: int) -> float:
    group = resolve(None)
    plan = plan_of("pull", group.world_size)
    operations = tuple(
        msgspec.structs.replace(operation, delay_us=delay_us)
        if isinstance(operation, Copy) and operation.name == "stage.0"
        else operation
        for operation in plan.schedule.operations
    )
    data = make_data(plan.problem, group.rank, 0)
    start_s = time.monotonic()
    result = compute(changed(plan, operations=operations), group, data, "library")
    assert torch.equal(result, data.exact.bfloat16())
    return time.monotonic() - start_s


def test_a_delayed_copy_delays_those_who_wait_for_it():
    assert all(took_s >= 0.2 for took_s in run_ranks(run_with_a_delay, 2, 200_000))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_rounds_a_cpu_matmul_once(dtype: torch.dtype):
    """What the library depth relies on: no 16-bit partial sums in any shape."""
    generator = torch.Generator().manual_seed(0)
    for m, k, n in ((1, 4096, 1), (2, 300, 3), (33, 2049, 17), (64, 4096, 1), (100, 777, 100)):
        a = torch.randn(m, k, generator=generator).to(dtype)
        b = torch.randn(k, n, generator=generator).to(dtype)
        exact = a.double() @ b.double()
        ours, ideal = ((result.double() - exact).norm() for result in (a @ b, exact.to(dtype)))
        assert ours <= ideal * 1.01 + 1e-9
