"""Attention over a sequence that ranks share: contiguous or zigzag, whole or of documents, with gradients."""

from overweave.attention.context_parallel import context_parallel_attention
from overweave.attention.sequence import zigzag_order

__all__ = ["context_parallel_attention", "zigzag_order"]
