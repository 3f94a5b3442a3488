"""Calibrated machine files: what is measured stands in them, what is not comes from a named machine and says so."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("cuda.bindings")

from overweave.hardware.machine import decode, load
from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us
from overweave.tuner.calibrate.attention import OPERATIONS, TOKENS, MeasuredAttention, rate_of
from overweave.tuner.calibrate.machine_file import FROM_FILE, CalibratedGpu, machine_file
from overweave.tuner.calibrate.rates import LONG_K, SHORT_K, Tile, split_us, tile_configs

LIKE, SOURCE = load("h200x4"), "measured 2026-11-25 on 1 x a GPU, torch 2.11: overweave calibrate"
HOPPER = tuple((config, Tile(700.0, 1.5)) for config in tile_configs("hopper"))
PORTABLE = tuple((config, Tile(650.0, 1.0)) for config in tile_configs("portable"))
FOUND = CalibratedGpu(
    device="a GPU",
    sms=114,
    memory_gb_per_s=2900.4,
    latencies={"call": 4.5, "kernel": 1.2, "flag": -0.1, "stream_wait, satisfied": 1.0},
    passes={"widen": 1500.0, "add": 2000.0, "narrow": 3000.0},
    tiles=(*HOPPER, *PORTABLE),
    library_scale=0.9,
    attention=(MeasuredAttention("forward", 128, 601.23, 9.87), MeasuredAttention("backward", 128, 500.0, 12.0)),
)


def test_what_was_measured_stands_in_the_file_with_its_source():
    machine = decode(machine_file("mine", FOUND, LIKE, SOURCE), "mine.json")
    assert (machine.name, machine.processor.sms, machine.hbm.gb_per_s) == ("mine", 114, 2900)
    assert (machine.latency.call.us, machine.latency.call.source) == (4.5, SOURCE)
    assert machine.latency.flag.us == 0.0
    assert machine.element_wise.add.gb_per_s == 2000
    assert machine.peer_access
    apart = decode(machine_file("mine", replace(FOUND, peer_access=False), LIKE, SOURCE), "mine.json")
    assert not apart.peer_access
    assert machine.tile("hopper", 128, 256).tflops == 700.0
    assert machine.tile("library", 128, 256).tflops == pytest.approx(0.9 * LIKE.tile("library", 128, 256).tflops)
    assert "0.900 times the rate of h200x4" in machine.tile("library", 128, 256).source


def test_attention_is_told_by_two_lengths():
    machine = decode(machine_file("mine", FOUND, LIKE, SOURCE), "mine.json")
    rate = machine.attention_rate("forward", 96)
    assert (rate.tflops, rate.overhead_us, rate.source) == (601.2, 9.9, SOURCE)
    assert machine.attention_rate("backward", 128).tflops == 500.0
    operations = [OPERATIONS["forward"] * 16 * 128 * tokens * (tokens + 1) / 2 for tokens in TOKENS]
    found = rate_of("forward", 128, (7.0 + operations[0] / 600e6, 7.0 + operations[1] / 600e6))
    assert found.tflops == pytest.approx(600.0)
    assert found.overhead_us == pytest.approx(7.0)
    none = decode(machine_file("mine", replace(FOUND, attention=()), LIKE, SOURCE), "mine.json")
    assert not none.attention  # not those of the machine that it is like, whose tensor cores are others


def test_what_was_not_is_that_of_the_named_machine_and_says_so():
    machine = decode(machine_file("mine", FOUND, LIKE, SOURCE), "mine.json")
    assert machine.links.push.points == LIKE.links.push.points
    assert machine.links.push.source.startswith("as h200x4: measured")
    assert machine.latency.join == replace(LIKE.latency.join, source=f"as h200x4: {LIKE.latency.join.source}")
    told = msgspec.json.decode(machine_file("mine", FOUND, LIKE, SOURCE))
    assert told["like"] == "h200x4"
    assert not set(FROM_FILE) & set(told)
    unmeasured = machine.tile("portable", 64, 64)
    assert unmeasured.source.startswith("estimate")
    assert unmeasured.tflops < 650


def test_with_several_gpus_copies_are_measured_too():
    several = replace(FOUND, push_points=((65536, 20.0), (1048576, 170.0)))
    links = decode(machine_file("mine", several, LIKE, SOURCE), "mine.json").links
    assert links.push.points == ((65536, 20.0), (1048576, 170.0))
    assert links.pull.source.startswith("as h200x4")


def test_a_kernel_that_the_gpu_does_not_run_is_not_described():
    told = machine_file("mine", replace(FOUND, tiles=PORTABLE), LIKE, SOURCE)
    assert {tile.kernel for tile in decode(told, "mine.json").tiles} == {"portable", "library"}


def test_predictions_can_be_made_on_it():
    machine = decode(machine_file("mine", FOUND, LIKE, SOURCE), "mine.json")
    problem = Problem(operator="all_gather_matmul", m=8192, n=4096, k=4096, world_size=4, dtype="bfloat16")
    plan = build("all_gather_matmul.per_shard", problem, {})
    assert total_us(plan, machine) > 1.02 * total_us(plan, LIKE)


def test_a_rate_and_what_a_tile_takes_beside_it_are_told_apart():
    config = MatmulConfig(block_m=128, block_n=256)
    us = [1.3 + 2.0 * 128 * 256 * k * 132 / 800e6 for k in (SHORT_K, LONG_K)]
    assert split_us(config, 132, *us) == pytest.approx(Tile(800.0, 1.3))
