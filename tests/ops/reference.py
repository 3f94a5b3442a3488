"""The operators in plain torch.distributed, with all that may follow: what tests compare with."""

from __future__ import annotations
