"""Every example runs, without a GPU, and shows what it says."""

from __future__ import annotations

import os
import re
import runpy

import pytest

from overweave.schedules.catalog.catalog import names
from tests import forked
from tests.source_tree import ROOT, python_path

EXAMPLES = ROOT / "examples"
RUN_BELOW = (
    "01_first_call.py",
    "02_schedule_by_hand.py",
    "03_simulate.py",
    "04_all_reduce.py",
    "05_compile.py",
    "06_chunks_by_hand.py",
    "07_several_weights.py",
    "08_tile_kernels.py",
    "09_uneven_blocks.py",
    "10_experts.py",
    "11_long_sequences.py",
    "12_placements.py",
    "13_loop_nests.py",
    "generate.py",
    "train_llama.py",
)


def example(name: str):
    return runpy.run_path(str(EXAMPLES / name))


def printed_by(name: str) -> str:
    """What an example prints in a process of its own: it starts its ranks itself."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    result = forked.run(str(EXAMPLES / name), env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


WAYS_INTO_TORCH = {  # docs/how-to/pytorch.md shows them; those of packages run in their environments (tests/torch)
    "plain.py": "[2, 32, 16] [2, 8, 16] [16, 16]",
    "installed.py": "fused_all_gather_matmul: 1 by overweave, 0 by torch",
    "planned.py": "as one GPU would: True",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS_INTO_TORCH)
def test_each_way_into_torch_runs(name: str):
    command = ["-m", "tests.scripts", "4", str(EXAMPLES / "torch" / name)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = forked.run(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert WAYS_INTO_TORCH[name] in done.stdout


def test_every_example_is_run_here():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted((*RUN_BELOW, "driver.py"))


def test_on_gpus_none_starts_where_multicast_is_asked_for():
    asked = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "NCCL_NVLS_ENABLE": "2", "PYTHONPATH": python_path()}
    done = forked.run(str(EXAMPLES / "01_first_call.py"), "--cuda", env={**os.environ, **asked})
    assert done.returncode == 1
    assert "run an example on GPUs: NVLink multicast is not switched off: NCCL_NVLS_ENABLE=2" in done.stderr


def test_schedule_by_hand(capsys: pytest.CaptureFixture[str]):
    example("02_schedule_by_hand.py")["main"]()
    printed = capsys.readouterr().out
    assert "push.0: put x@0[0:64,0:128] -> slot@1[0:64,0:128] signal arrived@1[0]" in printed
    assert printed.count(": refused") == 3
    assert printed.count(": proven") == 0
    assert all(rule in printed for rule in ("[signal]", "[reuse]", "[deadlock]"))


@pytest.mark.slow
def test_simulate(capsys: pytest.CaptureFixture[str]):
    namespace = example("03_simulate.py")
    namespace["main"]()
    assert "push" in capsys.readouterr().out
    reductions = ["ring_stored", "fused_ring", "scatter_stored", "scatter"]
    for operator, ours in (("all_gather_matmul", ["push"]), ("matmul_reduce_scatter", reductions)):
        timelines = namespace["compare"](operator)
        assert list(timelines)[: len(ours)] == [f"{operator}.{name}" for name in ours]
        assert set(timelines) == set(names(operator))


@pytest.mark.slow
def test_first_call():
    printed = printed_by("01_first_call.py")
    assert "rank 0 of 4: y [256, 96], z [64, 96], off plain torch by 0\n" in printed
    assert "all_gather_matmul.push" in printed


@pytest.mark.slow
def test_all_reduce():
    printed = printed_by("04_all_reduce.py")
    assert "5 plans and our choice: all equal plain torch" in printed
    assert ", because " in printed  # what explains our choice
    assert "Candidates: " in printed


@pytest.mark.slow
def test_several_weights():
    printed = printed_by("07_several_weights.py")
    assert (
        printed.count("query, key, value [96, 64], [96, 16], [96, 16]; off three calls by 0e+00; SwiGLU [96, 64]") == 2
    )
    assert "all_gather_matmul." in printed


@pytest.mark.slow
def test_uneven_blocks():
    assert printed_by("09_uneven_blocks.py").count(" multiplied ") == 4


@pytest.mark.slow
def test_experts():
    told = re.findall(r"by (\de[+-]\d+)", printed_by("10_experts.py"))
    assert len(told) == 4
    assert all(float(off) < 1e-4 for off in told)


@pytest.mark.slow
def test_long_sequences():
    told = re.findall(r"by (\de[+-]\d+)", printed_by("11_long_sequences.py"))
    assert len(told) == 8
    assert all(float(off) < 1e-4 for off in told)


@pytest.mark.slow
def test_placements(capsys: pytest.CaptureFixture[str]):
    example("12_placements.py")["main"]()
    printed = capsys.readouterr().out
    assert printed.count("step by step") == 9
    assert printed.count(" us as all_gather_matmul plan=") == 3


@pytest.mark.slow
def test_loop_nests(capsys: pytest.CaptureFixture[str]):
    example("13_loop_nests.py")["main"]()
    printed = capsys.readouterr().out
    assert printed.count("proven") == 2
    assert "refused: word 9, shift" in printed


@pytest.mark.nightly
def test_train_llama():
    one, every, difference = printed_by("train_llama.py").splitlines()
    assert one.partition(":")[2].split() == every.partition(":")[2].split()
    assert float(difference.split()[2]) < 1e-4


@pytest.mark.slow
def test_generate():
    assert "as one process generates them: True" in printed_by("generate.py")


@pytest.mark.slow
def test_compile():
    printed = printed_by("05_compile.py")
    assert printed.count("e-06 on 4 ranks") == 3


@pytest.mark.slow
def test_chunks_by_hand():
    printed = printed_by("06_chunks_by_hand.py")
    assert "A.pull.2-1.0: get A.gathered@1[32:64,0:32] -> A.gathered@2[32:64,0:32]" in printed
    assert "e-06 on 3 ranks" in printed


@pytest.mark.slow
def test_tile_kernels():
    printed = printed_by("08_tile_kernels.py")
    assert len(re.findall(r"off plain torch by (?:\d\.\de-0[678]|0\.0e\+00) on 4 ranks", printed)) == 3
