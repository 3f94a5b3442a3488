"""What a copy queue does, as data: copies, waits and writes between addresses of this process's address space."""

from __future__ import annotations

from msgspec import Struct


class MemoryRef(Struct, frozen=True):
    """Where a copy reads or writes: an absolute address, or an offset into an operator's tensor named `tensor`."""

    tensor: str | None
    address: int
    pitch_bytes: int


class CopyStep(Struct, frozen=True):
    """Copies `rows` rows of `row_bytes` bytes."""

    source: MemoryRef
    target: MemoryRef
    row_bytes: int
    rows: int


class WaitStep(Struct, frozen=True):
    """Waits until the own word at `address` is at least `value`."""

    address: int
    value: int


class WriteStep(Struct, frozen=True):
    """Sets a word, of any rank."""

    address: int
    value: int


StreamStep = CopyStep | WaitStep | WriteStep
