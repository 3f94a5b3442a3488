"""Machine descriptions: every number has a source, curves are sane, mistakes are named."""

from __future__ import annotations

import re

import msgspec
import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.cards import Basis, Gpu, find, machine_for, machine_named
from overweave.hardware.machine import FewRows, load, names
from overweave.hardware.topology import Curve, SmCurve, routes
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us
from tests.source_tree import ROOT

COUNTS = ("gpus", "between")  # how many GPUs there are, and which of them a link joins


def walk(value: object, path: str = ""):
    """(path, dict) of every object in a decoded JSON value."""
    if isinstance(value, dict):
        yield path, value
        for key, child in value.items():
            yield from walk(child, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from walk(child, f"{path}[{number}]")


def is_number(value: object) -> bool:
    """A number, or points of a curve."""
    if isinstance(value, tuple | list):
        return any(is_number(each) for each in value)
    return isinstance(value, int | float)


@pytest.mark.parametrize("name", names())
def test_every_number_has_a_source(name: str):
    for path, record in walk(msgspec.to_builtins(load(name))):
        numbers = [key for key, value in record.items() if is_number(value) and key not in COUNTS]
        assert not numbers or record.get("source"), f"{path} has {numbers} without a source"


@pytest.mark.parametrize("name", names())
def test_a_larger_transfer_never_takes_less_time(name: str):
    links = load(name).links
    sizes = [2**power for power in range(8, 31)]
    for curve in (links.push, links.pull, links.all_peers):
        times = [curve.time_us(size) for size in sizes]
        assert times == sorted(times)


def test_what_sms_push_grows_in_proportion_then_between_points_then_no_more():
    curve = SmCurve(points=((4.0, 100.0), (8.0, 160.0)), source="")
    assert [curve.gb_per_s(sms) for sms in (1, 4, 6, 8, 100)] == [25.0, 100.0, 130.0, 160.0, 160.0]


def test_a_curve_has_a_floor_its_points_and_a_last_rate():
    curve = Curve(points=((1000, 1.0), (3000, 2.0)), source="")
    assert curve.time_us(10) == curve.time_us(1000) == 1.0
    assert curve.time_us(2000) == pytest.approx(1.25)  # half way from 1 us to 1.5 us
    assert curve.time_us(6000) == pytest.approx(3.0)
    assert curve.peak_gb_per_s == 2.0


def test_collectives_of_unmeasured_group_sizes_follow_the_nearest():
    machine = load("h200x4")
    two, three, four = (machine.collective_us("all_gather", world, 2**26) for world in (2, 3, 4))
    assert four == pytest.approx(190, rel=0.01)
    assert two == pytest.approx(159, rel=0.01)
    assert 0 < three < four
    assert machine.collective_us("all_gather", 1, 2**26) == 0.0


def test_an_unlisted_tile_shape_takes_the_nearest_in_reuse():
    machine = load("h200x4")
    assert machine.tile("hopper", 128, 256).block_n == 256
    assert machine.tile("portable", 32, 64).block_m == 64


def test_mistakes_are_named():
    with pytest.raises(InputError, match="h200x4"):
        load("abacus")
    with pytest.raises(InputError, match="bfloat16"):
        load("h200x4").dtype_share("int4")
    with pytest.raises(InputError, match="hopper"):
        load("h200x4").tile("abacus", 128, 128)
    with pytest.raises(InputError, match="reduce_scatter"):
        load("h200x4").collective_us("all_to_all", 4, 2**20)


# Which described machine a GPU is found to be, and what stands in where none is described.

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.1, "nvswitch")


@pytest.mark.parametrize(
    ("gpu", "machine", "basis"),
    [
        (Gpu("NVIDIA H200", (9, 0), 132, 139.8, "nvswitch"), "h200x4", "measured"),
        (H100, "h100x8", "guess"),
        (Gpu("NVIDIA H100 PCIe", (9, 0), 114, 79.2, "pcie"), "h100_pciex8", "guess"),
        (Gpu("NVIDIA H100 NVL", (9, 0), 132, 93.1, "nvlink"), "h100_nvlx8", "guess"),
        (Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.3, "nvswitch"), "a100x8", "guess"),
        (Gpu("NVIDIA A100 80GB PCIe", (8, 0), 108, 79.3, "pcie"), "a100_pciex8", "guess"),
        (Gpu("NVIDIA L40S", (8, 9), 142, 44.4, "pcie"), "l40sx8", "guess"),
        (Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 23.6, "pcie"), "rtx4090x4", "guess"),
        (Gpu("NVIDIA GH200 480GB", (9, 0), 132, 94.5, "nvlink"), "gh200x4", "guess"),
        (Gpu("NVIDIA B200", (10, 0), 148, 178.3, "nvswitch"), "b200x8", "guess"),
        (Gpu("NVIDIA GB200", (10, 0), 148, 184.0, "nvswitch"), "gb200x72", "guess"),
        (replace(H100, joined="unknown"), "h100x8", "guess"),  # a driver that hides its links
        (Gpu("NVIDIA H200", (9, 0), 132, 139.8), "h200x4", "measured"),  # one GPU alone
        (replace(H100, joined="pcie"), "h100_pciex8", "nearest"),  # a card whose links are down
        (replace(H100, memory_gib=39.5, sms=60), "h100x8", "nearest"),  # a slice of one
        (Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.4, "nvswitch"), "a100x8", "nearest"),
        (Gpu("NVIDIA H20", (9, 0), 78, 95.0, "nvswitch"), "h100x8", "nearest"),
        (Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 31.4, "pcie"), "l40sx8", "nearest"),
        (Gpu("Tesla V100-SXM2-16GB", (7, 0), 80, 15.8, "nvlink"), "a800x4", "nearest"),
        (Gpu("", (0, 0), 0, 0.0), "rtx4090x4", "nearest"),  # a driver that tells nothing
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else str(value),
)
def test_a_gpu_is_found_by_what_it_is_and_how_it_is_joined(gpu: Gpu, machine: str, basis: Basis):
    found = find(gpu)
    assert (found.machine, found.basis) == (machine, basis)
    described = machine_for(found, 2)
    assert described.processor.sms == max(gpu.sms, 1)


def test_a_stand_in_has_as_many_sms_each_as_fast_and_rates_of_kernels_of_its_own_kind_alone():
    slice_of_one, another = replace(H100, sms=66, memory_gib=39.5), Gpu("A", (12, 0), 170, 31.4, "pcie")
    machine, described = machine_for(find(slice_of_one), 2), load(find(slice_of_one).machine)
    share = 66 / described.processor.sms
    assert machine.tile("hopper", 128, 256).tflops == pytest.approx(share * described.tile("hopper", 128, 256).tflops)
    assert {tile.kernel for tile in machine_for(find(another), 2).tiles} == {"library"}


def test_what_is_not_measured_says_so_and_asks_for_more():
    measured, guess, nearest = (
        find(gpu) for gpu in (replace(H100, name="NVIDIA H200", memory_gib=139.8), H100, replace(H100, name="A"))
    )
    assert (measured.doubt, guess.doubt, nearest.doubt) == (1.0, 2.0, 3.0)
    assert "guess from data sheets" in str(guess)
    assert "A joined by nvswitch is described nowhere" in str(nearest)
    assert "no links are seen" in str(find(replace(H100, joined="unknown")))
    assert [found.is_sure for found in (measured, guess, nearest)] == [True, False, False]


@pytest.mark.parametrize(("machine", "ranks", "gpus"), [("h200x4", 8, 8), ("rtx4090x4", 8, 8), ("gb200x72", 72, 72)])
def test_a_machine_stands_for_a_larger_one_of_its_kind(machine: str, ranks: int, gpus: int):
    described = machine_for(machine_named(machine), ranks)
    assert described.gpus == gpus
    joined = routes(described.topology, gpus)
    assert all(joined.between(0, rank) for rank in range(1, gpus))


@pytest.mark.parametrize(("machine", "ranks"), [("h200x4", 9), ("rtx4090x4", 16), ("gb200x72", 73)])
def test_no_host_has_so_many(machine: str, ranks: int):
    assert machine_for(machine_named(machine), ranks) is None


def test_pairs_of_a_larger_machine_are_joined_as_the_first_ones():
    eight = machine_for(machine_named("a800x4"), 8)
    assert len(eight.routes.between(4, 5)) == 1
    assert len(eight.routes.between(5, 6)) == 2
    assert not eight.routes.are_alike(8)


def test_every_card_is_found_as_itself_on_one_host():
    for machine in map(load, names()):
        if machine.card is not None and not machine.topology.has_hosts:
            gpu = Gpu(machine.card.names[0], machine.card.capability, machine.processor.sms, machine.card.memory_gib)
            assert find(replace(gpu, joined=machine.card.joined)).machine == machine.name


def test_what_is_like_another_is_no_card_of_it_and_was_not_measured():
    assert load("h800x8").card != load("h100x8").card
    assert load("h100x8").basis == "guess"


def test_an_unknown_machine_is_named():
    with pytest.raises(InputError, match="abacus"):
        machine_named("abacus")


# What our matmul of few rows saves: the measured numbers at their places, between them, and nothing far away.

MACHINE = load("h200x4")
KNOWN = MACHINE.few_rows
FILE = ROOT / "benchmarks" / "results" / "packed_skinny.h200x4.2026-11-22.txt"
ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(matmul .+)")
PLANS = {"sum": ("one_shot_packed", "two_shot_packed"), "gather": ("gather_packed",)}


def plan_of(name: str, matmul: str, m: int = 1, n: int = 4096, k: int = 3584) -> Plan:
    problem = Problem(operator=name.split(".")[0], m=m, n=n, k=k, world_size=4, dtype="bfloat16")
    return build(name, problem, {"matmul": matmul})


def measured() -> dict[tuple[int, int, int], dict[str, float]]:
    """Microseconds of each plan, by rows, n and k."""
    found = {}
    for line in FILE.read_text().splitlines():
        if row := ROW.fullmatch(line):
            times = re.findall(r"([a-z_]+_packed(?: matmul=\w+)?) ([\d.]+)", row[4])
            found[int(row[1]), int(row[2]), int(row[3])] = {name: float(us) for name, us in times}
    return found


def test_the_numbers_are_those_of_the_file() -> None:
    table = measured()
    assert len(table) == 24
    assert sorted((each.exchange, each.early, len(each.layers)) for each in KNOWN) == [
        ("gather", False, 4), ("gather", True, 4), ("sum", False, 4), ("sum", True, 4)
    ]  # fmt: skip
    for known in KNOWN:
        matmul = "early" if known.early else "skinny"
        for n, k, saved in known.layers:
            for rows, us in zip(known.rows, saved, strict=True):
                took = table[rows, n, k]
                gains = [took[plan] - took[f"{plan} matmul={matmul}"] for plan in PLANS[known.exchange]]
                assert us == pytest.approx(sum(gains) / len(gains), abs=0.11), (known.exchange, n, k, rows)


def known_of(exchange: str, early: bool) -> FewRows:
    return next(each for each in KNOWN if (each.exchange, each.early) == (exchange, early))


@pytest.mark.parametrize(
    ("name", "exchange"), [("matmul_all_reduce.one_shot_packed", "sum"), ("all_gather_matmul.gather_packed", "gather")]
)
def test_it_is_what_a_plan_is_predicted_to_save(name: str, exchange: str) -> None:
    n, k, us = known_of(exchange, True).layers[1]
    took = {how: total_us(plan_of(name, how, 1, n, k), MACHINE) for how in ("library", "early", "skinny")}
    assert took["library"] - took["early"] == pytest.approx(us[0], abs=1e-6)
    assert took["library"] > took["skinny"] > took["early"]


def test_between_and_beyond() -> None:
    known = known_of("sum", True)
    at = [known.saved_us(rows, 4096, 3584) for rows in (1, 4, 16, 32, 64, 500)]
    assert at == sorted(at, reverse=True)
    assert at[1] == pytest.approx((at[0] + at[2]) / 2)
    assert at[4] == at[5]
    assert known.saved_us(1, 4200, 3400) == at[0]
    assert known.saved_us(1, 64, 64) == known.saved_us(0, 4096, 3584) == 0.0


def test_nothing_is_saved_on_a_machine_that_was_not_measured() -> None:
    unknown = replace(MACHINE, few_rows=())
    took = [total_us(plan_of("matmul_all_reduce.one_shot_packed", how), unknown) for how in ("library", "skinny")]
    assert took[0] == took[1]
