"""The import contract: rooms stand on one another, never the other way, and the ground needs no GPU software."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.clock import slowness
from tests.source_tree import COMPUTED, Import, imports, modules, room

# Ground to roof. A room may import itself, the rooms named beside it, what those may import, and `errors`.
ROOMS = {
    "errors": (),
    "untrusted": (),
    "process_settings": (),
    "compat": (),
    "hardware": ("untrusted",),
    "ir": ("hardware",),
    "sim": ("ir",),
    "schedules": ("sim",),
    "lower": ("schedules",),
    "memory": ("ir", "hardware", "compat"),
    "lang": ("memory", "ir"),
    "kernels": ("lang",),
    "compiler": ("ir", "lang"),
    "runtime": ("compiler", "kernels", "schedules", "process_settings"),
    "tuner": ("runtime", "sim", "schedules", "lower"),
    "ops": ("tuner",),
    "functional": ("ops",),
    "moe": ("ops",),
    "attention": ("ops",),
    "layers": ("functional",),
    "adapters": ("layers", "moe", "attention"),
    "parallel": ("adapters",),
    "block": ("adapters",),
    "cli": ("block", "lower"),
}
# Beside the standard library. msgspec is the house's data format and numbers nobody's GPU: from `hardware` upwards.
THIRD_PARTY = {
    "errors": (),
    "untrusted": (),
    "process_settings": (),
    "compat": ("torch", "triton"),
    "hardware": ("msgspec",),
    "ir": ("msgspec",),
    "sim": ("msgspec",),
    "schedules": ("msgspec",),
    "lower": ("msgspec",),
    "memory": ("msgspec", "torch", "triton", "cuda"),
    "lang": ("triton",),
    "kernels": ("msgspec", "torch", "triton"),
    "compiler": ("msgspec", "libcst", "triton"),
    "runtime": ("msgspec", "torch", "triton", "numpy"),
    "tuner": ("msgspec", "torch", "platformdirs"),
    "ops": ("msgspec", "torch"),
    "functional": ("torch",),
    "moe": ("msgspec", "torch"),
    "attention": ("msgspec", "torch"),
    "layers": ("torch",),
    "adapters": ("torch", "transformers", "megatron", "deepspeed", "torchtitan", "spmd_types", "vllm"),
    "parallel": ("torch",),
    "block": ("msgspec", "torch"),
    "cli": ("msgspec", "typer", "rich", "matplotlib", "bokeh"),
}
PAPER_SIDE = ("errors", "untrusted", "hardware", "ir", "sim", "schedules", "lower")
# Laziness for weight: the public names, names of Triton and of torch that only what uses them must have, the one
# registry of the runtime that loads what runs a plan when a plan first asks for it, the command line, whose reading
# commands start without torch unless they are asked for experts or attention, and the page that `--html` asks for,
# whose package is an extra; blocks that `bench` compiles, and graphs that `install` fuses, for which torch's compiler
# is imported.
MAY_IMPORT_IN_FUNCTIONS = (
    "overweave",
    "overweave.compat.versions",
    "overweave.runtime.backends",
    "overweave.cli.main",
    "overweave.cli.commands.bench",
    "overweave.cli.programs",
    "overweave.cli.output_file",
    "overweave.adapters.symm_mem.install",
)
NEED_NO_TRITON = ("doctor", "show", "verify", "simulate")
IMPORT_BUDGET_S = 0.3


def closure(name: str) -> set[str]:
    below = {"errors", name}
    for direct in ROOMS[name]:
        below |= closure(direct)
    return below


def offences(module: str, found: Import) -> str:
    """Why an import breaks the contract, or nothing."""
    home, top = room(module), found.target.split(".")[0]
    if found.inside and module not in MAY_IMPORT_IN_FUNCTIONS:
        return f"imports {found.target} inside {found.inside}"
    if found.target == COMPUTED:
        return ""
    if top == "overweave":
        if not home:
            return ""  # the package itself: the public names
        above = found.target == "overweave" or room(found.target) not in closure(home)
        return f"imports {found.target}, which {home} may not" if above else ""
    if top in sys.stdlib_module_names or top in THIRD_PARTY.get(home, ()) or not home:
        return ""
    return f"imports {top}, which is not on the list of {home}"


def test_the_table_never_points_up():
    order = list(ROOMS)
    for name, below in ROOMS.items():
        assert all(order.index(other) < order.index(name) for other in below), name
    assert set(ROOMS) == set(THIRD_PARTY)


def test_every_module_stands_in_a_room():
    assert {room(name) for name in modules() if room(name)} <= set(ROOMS)


@pytest.mark.slow
def test_contract():
    broken = [
        f"{module}, line {found.line}: {why}"
        for module in modules()
        for found in imports(module)
        if (why := offences(module, found))
    ]
    assert not broken


def test_an_upward_import_would_be_seen():
    assert offences("overweave.ir.plan", Import("overweave.sim.cost", 1, ""))
    assert offences("overweave.ir.plan", Import("torch", 1, ""))
    assert offences("overweave.ir.plan", Import("json", 1, "encode"))
    assert offences("overweave.sim.cost", Import("overweave.schedules.catalog.catalog", 1, ""))
    assert offences("overweave.compiler.emit.fuse", Import("overweave.kernels.matmul", 1, ""))
    assert not offences("overweave.ops.linear", Import("overweave.ir.plan", 1, ""))


def test_no_two_modules_need_each_other():
    state: dict[str, int] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == 2:
            return
        assert state.get(module) != 1, " -> ".join((*path, module))
        state[module] = 1
        for found in imports(module):
            if found.target in modules() and found.target != module and not found.inside:
                visit(found.target, (*path, module))
        state[module] = 2

    for module in modules():
        visit(module, ())


def folder(module: str) -> str:
    """Of a module its folder, of a package itself."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def folder_imports() -> dict[str, dict[str, str]]:
    """By folder, the other folders of its room that it imports from when it is imported, each with one such import."""
    found: dict[str, dict[str, str]] = {}
    for module in modules():
        home = folder(module)
        for each in imports(module):
            if each.target in modules() and room(each.target) == room(module) and not each.inside:
                if (other := folder(each.target)) != home:
                    found.setdefault(home, {})[other] = f"{module} imports {each.target}"
    return found


def circles(arrows: dict[str, dict[str, str]]) -> list[str]:
    """Every arrow back to a folder from which one comes, with the import that makes it."""
    state: dict[str, str] = {}
    back: list[str] = []

    def visit(home: str) -> None:
        state[home] = "entered"
        for other, why in arrows.get(home, {}).items():
            if state.get(other) == "entered":
                back.append(f"{other} -> ... -> {home} -> {other}: {why}")
            elif other not in state:
                visit(other)
        state[home] = "left"

    for home in sorted(arrows):
        if home not in state:
            visit(home)
    return back


def test_no_two_folders_of_a_room_need_each_other():
    """The files that lie in a room itself are one folder more: what all of the room stands on, or what stands on it."""
    assert not circles(folder_imports())


def test_a_circle_of_folders_would_be_seen():
    arrows = {"rules": {"base": ""}, "engines": {"rules": ""}, "base": {"engines": "base imports engines"}}
    assert len(circles(arrows)) == 1
    del arrows["base"]
    assert not circles(arrows)


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def block(*names: str) -> str:
    """Code that makes packages look as if they were not installed."""
    return f"import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def test_the_paper_side_needs_neither_torch_nor_triton_nor_numpy():
    paper = [name for name in modules() if room(name) in PAPER_SIDE]
    run_python(block("torch", "triton", "numpy") + "\n".join(f"import {name}" for name in paper))


@pytest.mark.slow
def test_the_package_comes_without_triton_and_a_gpu_and_fast():
    code = block("triton") + (
        "import time, torch\nstart = time.perf_counter()\nimport overweave\nprint(time.perf_counter() - start)\n"
    )
    # The best of three: a busy machine may be slow, a slow import cannot be fast.
    assert any(float(run_python(code)) < IMPORT_BUDGET_S * slowness() for _ in range(3))


@pytest.mark.slow
def test_the_commands_that_read_and_think_come_without_triton():
    present = [
        f"overweave.cli.commands.{name}" for name in NEED_NO_TRITON if f"overweave.cli.commands.{name}" in modules()
    ]
    assert present
    run_python(block("triton") + "\n".join(f"import {name}" for name in present))
