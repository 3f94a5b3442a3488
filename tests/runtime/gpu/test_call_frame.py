"""What a call does around its own work, in order, of every kind that runs on a GPU: recorded, without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.memory.cuda import driver
from overweave.runtime.gpu import authored as authored_gpu
from overweave.runtime.gpu import bound as binding
from overweave.runtime.gpu import handwritten as handwritten_gpu
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.runtime.handwritten import MAIN, Declared, TileNotify, TileWait
from overweave.schedules.catalog.catalog import build

Log = list[str]
RANKS = 2


class Stream:
    """A stream that writes down what it waits for."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name
        self.cuda_stream = name

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.recorded}")


class Event:
    """An event that knows where it was recorded last."""

    recorded = "nothing"

    def record(self, stream: Stream) -> None:
        self.recorded = stream.name


class Turn:
    """Of the calls of a GPU."""

    is_held = False

    def __enter__(self) -> None:
        self.is_held = True

    def __exit__(self, *error: object) -> None:
        self.is_held = False


class Workspace:
    """A workspace that writes down what a call asks of it, and is entered and left in one turn."""

    device = torch.device("cpu")
    group = SimpleNamespace(rank=0, world_size=RANKS)
    captured_runs: ClassVar[list[object]] = []

    def __init__(self, log: Log) -> None:
        self.log, self.chain = log, SimpleNamespace(lock=Turn())
        self.streams: dict[str, Stream] = {}
        self.board = SimpleNamespace(post=lambda signature: log.append("post"))
        self.packed_space = lambda half_bytes: SimpleNamespace(product=lambda shape, dtype: torch.zeros(shape))

    def stream(self, queue: str) -> Stream:
        return self.streams.setdefault(queue, Stream(self.log, queue))

    def current_stream(self) -> Stream:
        return self.stream("caller")

    def enter(self) -> Stream:
        assert self.chain.lock.is_held
        self.log.append("enter caller")
        return self.current_stream()

    def leave(self, stream: Stream) -> None:
        assert self.chain.lock.is_held
        self.log.append(f"leave {stream.name}")


class Recorded:
    """Stands for what is bound."""

    copied = ("x",)

    def __init__(self, log: Log) -> None:
        self.log = log
        self.enqueue: Any = (lambda stream, *rest: log.append(f"work on {stream.name}"),)

    def launch_prologue(self, stream: object) -> None:
        self.log.append(f"begin {stream}")

    def prepare(self, tensors: object) -> None:
        self.log.append("prepare")


class RecordedSteps(Recorded):
    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.enqueue = lambda stream, action: log.append(f"{action.channel} on {stream.name}")
        self.wait = lambda stream, action: log.append(f"{stream.name} waits for {action.channel} {action.counts}")
        self.notify = lambda stream, action: log.append(f"{action.channel} told on {stream.name}")
        self.load_notify = lambda action: None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log: Log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "allocation_id", lambda address: 1)
    monkeypatch.setattr(binding, "BoundPlan", lambda plan, workspace, *rest: Recorded(log))
    monkeypatch.setattr(authored_gpu, "BoundPlan", lambda plan, workspace, *rest, **more: Recorded(log))
    monkeypatch.setattr(authored_gpu, "exchanged_tensors", lambda kernel, given: {"x": given["x"]})
    monkeypatch.setattr(handwritten_gpu, "_BoundProgram", lambda declared, layout, space: RecordedSteps(log))
    monkeypatch.setattr(handwritten_gpu, "Workspace", SimpleNamespace(of=lambda group, device: Workspace(log)))
    monkeypatch.setattr(binding, "library_call", lambda operation, *rest: lambda tensors: log.append(operation.name))
    start = SimpleNamespace(start=lambda stream: log.append(f"packed on {stream}"))
    monkeypatch.setattr(binding.PackedPlan, "_kernel", lambda self, is_later: start)

    def captured(enqueue: Any) -> Any:
        log.append("capture [")
        enqueue(Stream(log, "graph"))
        log.append("]")
        return SimpleNamespace(replay=lambda: log.append("replay"))

    monkeypatch.setattr(Workspace, "captures", SimpleNamespace(graph=captured), raising=False)
    monkeypatch.setattr(Workspace, "captured_runs", [])
    return log


def planned(operator: str, name: str) -> Plan:
    problem = Problem(operator=operator, world_size=RANKS, m=512, n=256, k=128, dtype="bfloat16")
    return build(f"{operator}.{name}", problem, {}, rank=0)


def plan_run(log: Log) -> Any:
    plan, tensor = planned("all_gather_matmul", "push"), torch.zeros(4)
    workspace: Any = Workspace(log)
    run = binding.bind_with_prologue(plan, workspace, {"x": tensor})
    log.clear()
    return lambda: run({"x": tensor})


def compiled_run(log: Log) -> Any:
    """The schedule of a compiled kernel has the same queues."""
    workspace: Any = Workspace(log)
    kernel: Any = None
    tensor = torch.zeros(4)
    run = authored_gpu.AuthoredRun(planned("all_gather_matmul", "push"), workspace, kernel, {"x": tensor, "M": 3})
    log.clear()
    return lambda: run({"x": tensor, "M": 3})


def steps_run(log: Log) -> Any:
    group: Any = None
    run = handwritten_gpu.HandwrittenRun(Declared({}, {}), group, torch.device("cpu"))
    steps: list[Any] = [
        (MAIN, TileNotify("first", 0, 1)),
        (MAIN, TileNotify("within", 0, 0)),
        ("beside", TileWait("second", ((0, 1),))),
        ("beside", TileWait("within", ((0, 1),))),
        ("beside", TileNotify("within", 0, 1)),
        (MAIN, TileWait("third", ((1, 1),))),
        (MAIN, TileWait("third", ((2, 1),))),
    ]
    return lambda: run(b"call", steps)


def packed_run(log: Log, operator: str = "matmul_all_reduce", name: str = "one_shot_packed") -> Any:
    tensors = {name: torch.zeros(4) for name in ("x", "w", "y")}
    workspace: Any = Workspace(log)
    run = PlanRun(workspace, binding.PackedPlan(planned(operator, name), workspace, tensors), (), True)
    return lambda where=tensors: run(where)


def frame(side: str, work: list[str], head: tuple[str, ...] = (), stream: str = "caller") -> list[str]:
    """A call with work beside it."""
    return [*head, f"begin {stream}", f"{side} waits for {stream}", *work, f"{stream} waits for {side}"]


def eager(run: Any, log: Log) -> list[str]:
    run()
    found = list(log)
    log.clear()
    return found


@pytest.mark.parametrize("make", [plan_run, compiled_run])
def test_a_call_is_chained_and_work_beside_it_begins_and_ends_with_it(log: Log, make: Any) -> None:
    found = eager(make(log), log)
    expected = frame("copies", ["work on caller"], ("enter caller", "prepare"))
    assert found == [*expected, "leave caller"]


@pytest.mark.parametrize("make", [plan_run, compiled_run])
def test_a_call_whose_tensors_come_back_is_launched_as_one_graph(log: Log, make: Any) -> None:
    run = make(log)
    eager(run, log)
    inside = frame("copies", ["work on graph"], stream="graph")
    assert eager(run, log) == ["enter caller", "capture [", *inside, "]", "replay", "leave caller"]
    assert eager(run, log) == ["enter caller", "replay", "leave caller"]


@pytest.mark.parametrize("make", [plan_run, compiled_run])
def test_a_graph_is_not_launched_on_memory_that_the_driver_gave_out_anew_at_the_same_address(
    log: Log, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(log)
    for _ in range(2):
        eager(run, log)
    monkeypatch.setattr(driver, "allocation_id", lambda address: 2)
    assert "replay" not in eager(run, log)


@pytest.mark.parametrize("make", [plan_run, compiled_run])
def test_what_the_caller_captures_is_neither_chained_nor_prepared(
    log: Log, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(log)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        assert eager(run, log) == frame("copies", ["work on caller"])


def test_steps_of_hand_fused_kernels(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = steps_run(log), ["first told on caller", "second on beside", "beside waits for caller"]
    steps += ["within on beside"]
    steps += ["caller waits for third ((1, 1), (2, 1))", "caller waits for second ((0, 1),)", "caller waits for caller"]
    expected = frame("beside", steps, ("post", "enter caller"))
    assert eager(run, log) == [*expected, "leave caller"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert eager(run, log) == frame("beside", steps, ("post",))


@pytest.mark.parametrize(
    ("operator", "name", "steps"),
    [
        ("matmul_all_reduce", "one_shot_packed", ["multiply.0", "packed on caller"]),
        ("all_gather_matmul", "gather_packed", ["packed on caller", "multiply.0"]),
    ],
)
def test_packed_messages_have_no_head(
    operator: str, name: str, steps: list[str], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = packed_run(log, operator, name)
    found = eager(run, log)
    assert found == ["enter caller", *steps, "leave caller"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert eager(run, log) == found[1:-1]


def test_packed_messages_whose_tensors_come_back_are_one_graph(log: Log) -> None:
    run, elsewhere, steps = packed_run(log), {name: torch.zeros(4) for name in ("x", "w", "y")}, ["multiply.0"]
    assert eager(run, log) == ["enter caller", *steps, "packed on caller", "leave caller"]
    assert eager(lambda: run(elsewhere), log) == ["enter caller", *steps, "packed on caller", "leave caller"]
    captured = ["enter caller", "capture [", *steps, "packed on graph", "]", "replay", "leave caller"]
    assert eager(run, log) == captured
    assert eager(run, log) == ["enter caller", "replay", "leave caller"]
    assert eager(lambda: run(elsewhere), log) == captured
    (bound,) = (cell.cell_contents for cell in run.__closure__ if isinstance(cell.cell_contents, PlanRun))
    bound._may_replay = False
    assert eager(run, log) == ["enter caller", *steps, "packed on caller", "leave caller"]


@pytest.mark.parametrize("make", [plan_run, compiled_run, steps_run, packed_run])
def test_what_a_graph_of_the_callers_replays_outlives_who_made_it(
    log: Log, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(log)
    eager(run, log)
    assert Workspace.captured_runs == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        eager(run, log)
    made = run.__closure__
    kept = [cell.cell_contents for cell in made if cell.cell_contents in Workspace.captured_runs]
    assert len(kept) == len(Workspace.captured_runs) == 1
