"""An address as an index for each dimension of a tensor, held against what a directive says of it."""
