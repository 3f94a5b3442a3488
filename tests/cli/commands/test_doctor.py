from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from typer.testing import CliRunner

import overweave
from overweave.cli.commands import doctor
from overweave.cli.main import app
from overweave.cli.ranks import rank_count
from overweave.errors import KernelUnavailable, MachineError
from overweave.hardware.multicast import WITHOUT
from overweave.runtime import diagnosis, finding
from overweave.runtime.finding import Check, DeviceFinding

OK = Check("fine", lambda: DeviceFinding("ok", "all there"))
BAD = Check("broken", lambda: DeviceFinding("failed", "nothing there", "Plug it in"))


def raises() -> DeviceFinding:
    raise OSError("no such device")


@pytest.fixture
def checks(monkeypatch):
    def use(*given: Check) -> None:
        monkeypatch.setattr(doctor, "ALL_CHECKS", given)

    return use


@pytest.mark.parametrize(("given", "code", "told"), [((OK,), 0, "all there"), ((OK, BAD), 1, "Plug it in")])
def test_a_healthy_machine_exits_with_0_and_a_failed_check_shows_its_cure(checks, given, code, told):
    checks(*given)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert told in result.stdout


def test_json_is_one_object(checks):
    checks(OK, BAD)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["healthy"] is False
    assert told["checks"][1] == {"name": "broken", "status": "failed", "found": "nothing there", "cure": "Plug it in"}


def test_what_this_machine_says_fits_json():
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert {"packages", "python", "torch", "caches"} <= {check["name"] for check in told["checks"]}


def test_a_probe_that_raises_has_failed():
    finding = Check("raises", raises).run()
    assert finding.status == "failed"
    assert "no such device" in finding.found
    assert finding.cure


def test_checks_for_gpus_are_not_asked_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    asked = (Check("of a GPU", BAD.probe, needs_gpu=True), OK)
    assert [line.name for line in doctor.examine(asked)] == ["fine"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [line.name for line in doctor.examine(asked)] == ["of a GPU", "fine"]


@pytest.mark.slow
def test_without_torch_it_says_so_and_looks_at_the_rest():
    code = "import sys; sys.modules['torch'] = None; from overweave.cli.main import app; app(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    lines = {line["name"]: line for line in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1, done.stderr
    assert lines["torch"]["cure"] == "pip install 'torch>=2.10'"
    assert {"packages", "caches"} <= lines.keys()


@pytest.mark.parametrize(
    ("what", "version", "status"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", "ok"),
        ("older", "2.9.1", "failed"),
        ("roof", "2.15.1+cu132", "ok"),
        ("newer", "2.16.0+cu132", "note"),
    ],
)
def test_versions_of_torch(what, version, status, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert diagnosis._torch().status == status


def test_triton_with_a_numpy_that_breaks_its_interpreter(monkeypatch):
    monkeypatch.setattr(diagnosis, "installed", {"triton": "3.6.0", "numpy": "2.4.1"}.get)
    for gpus, status in ((0, "failed"), (1, "note")):  # where there is a GPU, nothing needs the interpreter
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert diagnosis._triton().status == status
        assert "emulated ranks" in diagnosis._triton().found
    monkeypatch.setattr(diagnosis, "installed", {"triton": "3.6.0", "numpy": "2.3.5"}.get)
    assert diagnosis._triton().status == "ok"
    monkeypatch.setattr(diagnosis, "installed", lambda package: "")
    assert diagnosis._triton().status == "note"


@pytest.mark.parametrize(
    ("version", "status", "said"), [("3.9.0", "ok", "3.9.0"), ("3.5.1", "note", "older"), ("3.10.0", "note", "newer")]
)
def test_versions_of_triton(version, status, said, monkeypatch):
    monkeypatch.setattr(diagnosis, "installed", {"triton": version, "numpy": "2.3.5"}.get)
    finding = diagnosis._triton()
    assert finding.status == status
    assert said in finding.found


def test_a_triton_that_hides_another(monkeypatch, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "triton").mkdir(parents=True)
        (tmp_path / name / "triton" / "__init__.py").touch()
    monkeypatch.setattr(diagnosis, "installed", {"triton": "3.9.0", "numpy": "2.3.5"}.get)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path / "other")])
    finding = diagnosis._triton()
    assert finding.status == "note"
    assert f"of {tmp_path / 'one'}, which hides another in {tmp_path / 'other'}" in finding.found


def test_kernels_that_cannot_be_made_and_launches_by_the_wrapper(monkeypatch):
    def check(device):
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    answers = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(diagnosis, "load", lambda name: check)
    for answer, status, said in (
        (True, "ok", "loaded"),
        (False, "note", "Triton's own wrapper"),
        (KernelUnavailable("compile tell_kernel", "PermissionError: ptxas", "Use another Triton"), "failed", "ptxas"),
    ):
        answers.append(answer)
        finding = diagnosis._kernels()
        assert (finding.status, said in finding.found) == (status, True)


@pytest.mark.parametrize(
    ("cuda", "found", "cure"),
    [(None, "was built without CUDA", "CUDA build"), ("13.0", "for CUDA 13.0 sees no GPU", "CUDA_VISIBLE_DEVICES")],
)
def test_a_torch_that_sees_no_gpu_beside_a_driver(monkeypatch, cuda: str | None, found: str, cure: str):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = diagnosis._gpus()
    assert (finding.status, found in finding.found, cure in finding.cure) == ("failed", True, True)
    with pytest.raises(MachineError, match=found):
        rank_count("cuda", 2)


@pytest.mark.parametrize(
    ("has", "told", "status", "says"),
    [
        (False, {}, "ok", "no GPU here has it"),
        (True, WITHOUT, "ok", "off: NCCL_NVLS_ENABLE=0"),
        (True, {}, "note", "NCCL uses it in groups of 3 and more"),
        (True, {"NCCL_NVLS_ENABLE": "0"}, "note", "NVSHMEM_DISABLE_NVLS not set"),
    ],
)
def test_what_is_said_of_multicast(monkeypatch, has: bool, told: dict[str, str], status: str, says: str):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(diagnosis, "has_multicast", lambda device: has)
    for name in WITHOUT:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    finding = diagnosis._multicast()
    assert finding.status == status
    assert says in finding.found
    assert all(name in finding.found for name in WITHOUT)


def test_what_compiles_annotated_kernels_may_be_missing(monkeypatch):
    monkeypatch.setattr(diagnosis, "installed", lambda package: "")
    finding = diagnosis._libcst()
    assert (finding.status, "pip install" in finding.cure) == ("note", True)
    monkeypatch.setattr(diagnosis, "installed", {"libcst": "1.8.0"}.get)
    assert diagnosis._libcst().status == "ok"


def test_a_package_that_was_loaded_from_its_tree_is_found(monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(finding, "version", missing)
    assert finding.installed("overweave") == overweave.__version__
    assert finding.installed("no_such_package") == ""


def test_little_shared_memory(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 64 << 20}))
    assert "--shm-size" in diagnosis._shared_memory().cure


def test_caches_that_others_may_write(tmp_path):
    folder = tmp_path / "cache"
    assert doctor.cache_finding({"triton": folder}).status == "ok"
    folder.mkdir(mode=0o700)
    assert doctor.cache_finding({"triton": folder}).status == "ok"
    folder.chmod(0o777)
    assert doctor.cache_finding({"triton": folder}).status == "failed"
