"""Fused kernels as text: golden files, the author's lines that survive, files that are written once and imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from overweave.compiler.emit import fuse as fuse_module
from overweave.compiler.emit.emit import generated_path, write_generated
from overweave.compiler.emit.fuse import kernel_of
from overweave.errors import DirectiveError, InputError
from overweave.ops.author.compile import FusedKernel, compile
from tests.clock import ends_within
from tests.source_tree import ROOT, python_path

pytestmark = pytest.mark.slow

KERNELS = ROOT / "examples" / "kernels"
PUSH, SCATTER = "all_gather.push pieces=2", "reduce_scatter.scatter"
FUSED = {
    "matmul.gathered": ("matmul.py:matmul_kernel", PUSH),
    "matmul.both": ("matmul.py:matmul_kernel", {"A": PUSH, "C": SCATTER}),
    "matmul.by_tiles": ("matmul.py:matmul_kernel", "all_gather.push mover=tiles"),
    "persistent.by_tiles": ("persistent.py:persistent_kernel", "all_gather.push mover=bulk_tiles"),
    "matmul.at_peers": ("matmul.py:matmul_kernel", {"A": PUSH, "C": "reduce_scatter.scatter mover=tiles"}),
    "norm.at_peers": ("norm.py:rms_norm_kernel", "spread.push mover=tiles"),
    "matmul.collective": ("matmul.py:matmul_kernel", "all_gather.collective"),
    "persistent.both": ("persistent.py:persistent_kernel", {"A": PUSH, "C": SCATTER}),
    "gate_up.gathered": ("gate_up.py:gate_up_kernel", PUSH),
    "batched.gathered": ("batched.py:batched_kernel", {"B": PUSH}),
    "norm.spread": ("norm.py:rms_norm_kernel", "spread.push"),
    "layer_norm.gathered": ("layer_norm.py:layer_norm_kernel", PUSH),
    "attention.gathered": ("attention.py:attention_kernel", {"K": PUSH, "V": PUSH}),
}


def fused(name: str) -> FusedKernel:
    kernel, schedule = FUSED[name]
    return compile(f"{KERNELS}/{kernel}", schedule)


@pytest.mark.parametrize("name", FUSED)
def test_text(name: str, golden: Callable[[str, str], None]):
    text = fused(name).source()
    ast.parse(text)
    golden(f"fused/{name}.txt", text)


@pytest.mark.parametrize("name", FUSED)
def test_what_the_author_wrote_survives(name: str):
    """Every line but those of the dispatch region, the tile's number, the annotated stores and the streamed loop."""
    kernel = fused(name)
    text = kernel.source()
    lines = [line.strip() for line in kernel.kernel.source.module.code.splitlines()]
    marks = [i for i, line in enumerate(lines) if "dispatch end" in line or "@overweave.tile_id" in line]
    changed = ("store(", "range(low", "range(0, high", "program_id")
    kept = [line for line in lines[marks[-1] :] if line and not any(word in line for word in changed)]
    assert [line for line in kept if line not in text] == []


def test_a_kernel_that_waits_for_nothing_has_no_verdict():
    text = fused("matmul.collective").source()
    body = text.split('"""C = A @ B')[1]
    assert "verdict" not in body
    assert "finish_tile" not in body


def test_the_fused_module_imports_alone(tmp_path: Path):
    """Beside nothing of the author's, in a process of its own."""
    path = tmp_path / "alone.py"
    path.write_text(fused("persistent.both").source())
    code = "import alone; print(alone.persistent_kernel.arg_names[0], hasattr(alone, 'tile_of'))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": python_path(tmp_path)},
    )
    assert ran.stdout == "a_desc False\n", ran.stderr  # the dispatch region was all that used it


def test_the_annotated_kernel_does_not_need_us():
    for path in KERNELS.glob("*.py"):
        assert "import overweave" not in path.read_text()


def test_a_file_is_trusted_only_if_it_holds_the_text(tmp_path: Path):
    path = write_generated(tmp_path, "kernel", "x = 1\n")
    assert path == generated_path(tmp_path, "kernel", "x = 1\n")
    stamp = path.stat().st_mtime_ns
    assert write_generated(tmp_path, "kernel", "x = 1\n").stat().st_mtime_ns == stamp
    path.write_text("import os\n")
    assert write_generated(tmp_path, "kernel", "x = 1\n").read_text() == "x = 1\n"
    assert write_generated(tmp_path, "kernel", "x = 2\n") != path
    assert len(list(tmp_path.iterdir())) == 2


HOSTILE = ('"""', "'''", "import os", "__import__('os').system('x')", "{x}", "\\n", "${IFS}", "a b")


@pytest.mark.slow
@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_never_reach_the_text(tmp_path: Path, word: str):
    """In a directive, in a schedule, in the name of the file."""
    source = (KERNELS / "matmul.py").read_text()
    changes = (
        ("axis M block=BLOCK_M", f"axis M block={word}"),
        ("load A=a_ptr", f"load {word}=a_ptr"),
        ("a_ptr[M, K]", f"a_ptr[M, {word}]"),
    )
    for index, (old, new) in enumerate(changes):
        path = tmp_path / f"{index}.py"
        path.write_text(source.replace(old, new, 1))
        with pytest.raises((DirectiveError, InputError)):
            kernel_of(path, "matmul_kernel")
    for schedule in (f"all_gather.push {word}", f"all_gather.push pieces={word}", {word: PUSH}, word):
        with pytest.raises(InputError):
            compile(f"{KERNELS}/matmul.py:matmul_kernel", schedule)
    path = tmp_path / f"{word.replace('/', '')}.py"
    path.write_text(source)
    text = compile(f"{path}:matmul_kernel", PUSH).source()
    assert text.startswith('"""matmul_kernel of a file, fused')


LARGE = {"M": 8192, "N": 3584, "K": 4096, "BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8}
LARGE |= dict.fromkeys(("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"), 1)
LEAST_MARGIN = 2  # of the second that a kernel may take


@pytest.mark.parametrize("name", FUSED)
def test_a_kernel_is_fused_in_much_less_than_a_second(name: str):
    """Read, understood, woven, proven and written; what Triton does then is its own. CPU time: others may be busy."""

    def fuse() -> None:
        fuse_module._read.cache_clear()
        made = fused(name)
        made.source()
        if name.startswith("matmul"):
            made.plan(LARGE, 4, rank=0)

    ends_within(1 / LEAST_MARGIN, fuse)
