"""An address as one index per dimension of a tensor, checked against a directive."""
