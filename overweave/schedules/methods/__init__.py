"""Methods: each way to communicate beside a matmul, as one record, with the registry and the one rule of validity."""
