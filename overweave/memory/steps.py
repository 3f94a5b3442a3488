"""Stream operations of a copy queue, as data: copies, waits and writes of addresses in this process's address space."""

from __future__ import annotations

from msgspec import Struct


class MemoryRef(Struct, frozen=True):
    """Where a copy reads or writes: an absolute address, or an offset into an operator's tensor named `tensor`."""

    tensor: str | None
    address: int
    pitch_bytes: int


class CopyStep(Struct, frozen=True):
    """Copy `rows` rows of `row_bytes` bytes."""

    source: MemoryRef
    target: MemoryRef
    row_bytes: int
    rows: int


class WaitStep(Struct, frozen=True):
    """Wait until this rank's word at `address` is at least `value`."""

    address: int
    value: int


class WriteStep(Struct, frozen=True):
    """Set a word of any rank."""

    address: int
    value: int


StreamStep = CopyStep | WaitStep | WriteStep
