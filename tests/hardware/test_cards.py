"""Which described machine a GPU is found to be, and what stands in where none is described."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.cards import Basis, Gpu, find, machine_for, machine_named
from overweave.hardware.machine import load, names
from overweave.hardware.topology import routes

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


def test_every_card_is_found_as_itself():
    for machine in map(load, names()):
        if machine.card is not None:
            gpu = Gpu(machine.card.names[0], machine.card.capability, machine.processor.sms, machine.card.memory_gib)
            assert find(replace(gpu, joined=machine.card.joined)).machine == machine.name


def test_what_is_like_another_is_no_card_of_it_and_was_not_measured():
    assert load("h800x8").card != load("h100x8").card
    assert load("h100x8").basis == "guess"


def test_an_unknown_machine_is_named():
    with pytest.raises(InputError, match="abacus"):
        machine_named("abacus")
