"""A transformer block: its cases, what torch's pass fuses of it, what is predicted, and every way on emulated ranks."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from overweave.block import ways
from overweave.block.cases import BlockCase, BlockSizes, BlockWork, read_blocks
from overweave.block.predicted import FusedCounts, predicted
from overweave.cli.main import app
from overweave.errors import InputError
from overweave.memory.group import resolve
from overweave.schedules.records.outside import OUTSIDE
from overweave.schedules.records.outside import TORCH_FUSED as TORCH_OPERATOR
from overweave.tuner.measure.baselines import OURS, SEQUENTIAL, TORCH_FUSED
from overweave.tuner.measure.bench import BenchRequest
from overweave.tuner.measure.timer import Effort
from overweave.tuner.space.target import target_named
from tests import forked
from tests.ranks import run_ranks

SIZES = BlockSizes(width=32, inner=64, heads=4, kv_heads=2)
WORK: tuple[BlockWork, ...] = ("forward", "training", "decoding")


def case(work: BlockWork, tokens: int = 16, sequences: int = 2) -> BlockCase:
    return BlockCase("tiny", SIZES, work, tokens, tokens if work == "decoding" else sequences)


def test_the_repositorys_blocks_are_llamas():
    cases = read_blocks("llama").cases
    assert {each.block for each in cases} == {"Llama-3-8B", "Llama-3-70B"}
    assert {each.work for each in cases} == set(WORK)
    for each in cases:
        each.check(4)


@pytest.mark.parametrize(
    ("wrong", "ranks", "found"),
    [
        (case("forward"), 3, "do not divide by 3"),
        (case("forward", tokens=6), 2, "3 tokens of a sequence do not divide by 2"),
        (BlockCase("odd", BlockSizes(36, 64, 4, 2), "forward", 16, 2), 2, "even numbers"),
    ],
)
def test_what_cannot_be_split_is_refused(wrong: BlockCase, ranks: int, found: str):
    with pytest.raises(InputError, match=found):
        wrong.check(ranks)


def test_a_file_of_another_form_is_refused(tmp_path: Path):
    file = tmp_path / "it.json"
    file.write_text(json.dumps({"blocks": {"a": {"width": 0, "inner": 1, "heads": 1, "kv_heads": 1}}, "tokens": {}}))
    with pytest.raises(InputError, match="kv_heads"):
        read_blocks(str(file))


@pytest.mark.parametrize("work", WORK)
def test_overweave_is_predicted_to_be_no_slower_than_the_library(work: BlockWork):
    whole = read_blocks("llama").cases
    chosen = min((each for each in whole if each.work == work), key=lambda each: each.tokens)
    found = predicted(chosen, 4, target_named("h200x4"), FusedCounts(0, 0))
    assert found.overweave_us <= found.sequential_us == found.torch_us
    assert len(found.sites) == {"forward": 4, "training": 8, "decoding": 2}[work]
    # As long as torch's operator keeps its host; of an all-reduce it has none.
    least_us = OUTSIDE[TORCH_OPERATOR].least_host_us
    assert all(site.torch_us is None if work == "decoding" else site.torch_us >= least_us for site in found.sites)


def test_every_described_machine_is_predicted():
    large = max(read_blocks("llama").cases, key=lambda each: each.tokens * (each.work == "forward"))
    times = {
        name: predicted(large, 4, target_named(name), FusedCounts(0, 0)).overweave_us
        for name in ("h200x4", "a100_pciex8", "b200x8")
    }
    assert times["b200x8"] < times["h200x4"] < times["a100_pciex8"]
    with pytest.raises(InputError, match="cannot have 16 GPUs"):
        predicted(case("forward"), 16, target_named("h200x4"), FusedCounts(0, 0))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["all_gather_matmul", "--simulate", "h200x4"], "operators are benched on ranks"),
        (["block", "--device=cpu", "--plan", "push"], "the layers choose plans"),
        (["block", "--device=cpu", "--shapes", "nowhere"], "no such file or set"),
        (["block", "--device=cpu", "-w", "3"], "do not divide by 3"),
    ],
)
def test_what_is_no_bench_of_blocks_is_refused(words: list[str], found: str):
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2
    assert found in " ".join(result.output.split())


@pytest.mark.slow
def test_torchs_pass_is_asked_what_it_fuses(tmp_path: Path):
    """Of two sequences half of the sites, of an all-reduce nothing. Its process joins a fake group."""
    file = tmp_path / "it.json"
    whole = {"width": 4096, "inner": 14336, "heads": 32, "kv_heads": 8}
    file.write_text(json.dumps({"blocks": {"a": whole}, "tokens": {"forward": [512], "decoding": [4]}}))
    words = ["-m", "overweave.cli.main", "bench", "block", f"--shapes={file}", "--simulate=h200x4"]
    shown = forked.run(*words).stdout
    assert "2 of 4" in shown
    assert "0 of 2" in shown


def rows(work: BlockWork, is_compiled: bool) -> list[list[str]]:
    """For `run_ranks`: the ways that ran and what was counted of their graphs, and those that were left out."""
    request = BenchRequest(operator="block", device="cpu", dtype="fp32", effort=Effort(rounds=2, warmup=1))
    with patch.object(ways, "WAYS", tuple(way for way in ways.WAYS if is_compiled or way.graph is None)):
        (run,) = ways.block_runs((case(work),), request, resolve(None))
    (measured,) = run.cases
    return [[f"{row.name} {row.plan}".rstrip() for row in measured.methods], list(measured.left_out)]


@pytest.mark.slow
def test_torchs_styles_and_overweaves_compute_one_block():
    for work in WORK:
        assert run_ranks(rows, 2, work, False) == [[[SEQUENTIAL, OURS], []]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("work", WORK)
def test_compiled_blocks_tell_how_much_of_them_is_fused(work: BlockWork):
    """torch's pass fuses nothing without NCCL, and is left out."""
    (ran, left), _ = run_ranks(rows, 2, work, True, timeout_s=280.0)
    count, ours = {"forward": (4, 4), "training": (11, 8), "decoding": (2, 2)}[work]
    assert ran == [SEQUENTIAL, f"compiled 0 of {count} fused", OURS, f"installed {ours} of {ours} fused"]
    assert left == [TORCH_FUSED]
