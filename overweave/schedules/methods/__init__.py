"""Methods: each way to communicate beside a matmul, as one record, and the registry of all."""
