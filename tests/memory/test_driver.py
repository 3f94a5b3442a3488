from __future__ import annotations

from typing import Any

import pytest

from overweave.memory import driver

Kind = driver.driver.CUstreamBatchMemOpType
Flags = driver.driver.CUstreamWriteValue_flags


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What reaches the driver."""
    calls: list[tuple[str, Any]] = []
    done = (driver.driver.CUresult.CUDA_SUCCESS,)

    def batch(stream: int, count: int, operations: tuple[Any, ...], flags: int) -> tuple[Any]:
        assert count == len(operations)
        calls.append(("batch", [one.writeValue for one in operations]))
        return done

    def write(stream: int, address: int, value: int, flags: int) -> tuple[Any]:
        calls.append(("write", (int(address), value, flags)))
        return done

    monkeypatch.setattr(driver.driver, "cuStreamBatchMemOp", batch)
    monkeypatch.setattr(driver.driver, "cuStreamWriteValue32", write)
    return calls


def test_one_word_is_written_behind_a_fence(enqueued: list[tuple[str, Any]]):
    driver.write_values(7, (1024,), 1)
    assert enqueued == [("write", (1024, 1, int(Flags.CU_STREAM_WRITE_VALUE_DEFAULT)))]


def test_several_words_are_one_batch_with_one_fence_ahead_of_all(enqueued: list[tuple[str, Any]]):
    driver.write_values(7, (1024, 2048, 4096), 1)
    [(kind, writes)] = enqueued
    assert kind == "batch"
    assert [int(one.address) for one in writes] == [1024, 2048, 4096]
    assert {int(one.value) for one in writes} == {1}
    assert {int(one.operation) for one in writes} == {int(Kind.CU_STREAM_MEM_OP_WRITE_VALUE_32)}
    fenced, free = Flags.CU_STREAM_WRITE_VALUE_DEFAULT, Flags.CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
    assert [int(one.flags) for one in writes] == [int(fenced), int(free), int(free)]
