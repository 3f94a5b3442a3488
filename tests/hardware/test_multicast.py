"""What switches NVLink multicast off, who asks for it, and whose tables hold where NCCL uses it."""

from __future__ import annotations

import os

import pytest

from overweave.errors import MachineError
from overweave.hardware.multicast import (
    WITHOUT,
    is_off,
    nccl_uses_it,
    require_off,
    settings,
    settings_for_child,
    switch_off,
)
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import fingerprint, path_of, shipped


def test_the_variables_of_the_libraries():
    assert dict(WITHOUT) == dict(zip(
        ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"), "011", strict=True
    ))  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_one_that_is_missing_or_otherwise_is_refused(name: str):
    for environment in ({**WITHOUT, name: "2"}, {key: value for key, value in WITHOUT.items() if key != name}):
        assert not is_off(environment)
        with pytest.raises(MachineError, match=f"{name}( not set|=2).*Set NCCL_NVLS_ENABLE="):
            require_off("run", environment)
    assert is_off(WITHOUT)
    require_off("run", WITHOUT)


def test_nobodys_word_is_overruled():
    environment = {"NCCL_NVLS_ENABLE": "2"}
    switch_off(environment)
    assert environment == {**WITHOUT, "NCCL_NVLS_ENABLE": "2"}
    assert "NCCL_NVLS_ENABLE=2, TORCH_SYMM_MEM_DISABLE_MULTICAST=1" in settings(environment)


def test_processes_that_are_started_keep_it_off():
    assert settings_for_child({}) == settings_for_child({"NCCL_NVLS_ENABLE": "2"}) == {}
    assert settings_for_child({"NVSHMEM_DISABLE_NVLS": "1"}) == settings_for_child(WITHOUT) == dict(WITHOUT)


def test_a_machine_on_which_nccl_uses_it_is_another(monkeypatch: pytest.MonkeyPatch):
    with_it, without = Target("cuda", has_multicast=True), Target("cuda")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", WITHOUT["NCCL_NVLS_ENABLE"])
    assert fingerprint(with_it, 4) == fingerprint(without, 4)
    for value in (None, "1", "2"):
        if value is None:
            monkeypatch.delenv("NCCL_NVLS_ENABLE")
        else:
            monkeypatch.setenv("NCCL_NVLS_ENABLE", value)
        assert nccl_uses_it(4)
        assert with_it.device(2) == without.device(4) == "NVIDIA H200"  # NCCL takes two ranks for too few
        assert with_it.device(4) != without.device(4)
        assert path_of(fingerprint(with_it, 4)).name.startswith("nvidia-h200-nvlink-multicastx4.")
        assert shipped(with_it.device(4), 4) is None
        assert shipped(with_it.device(2), 2) is not None
    assert Target("cpu", has_multicast=True).device(4) == "cpu"


def test_tests_and_campaigns_have_it_off():
    assert is_off(os.environ)
