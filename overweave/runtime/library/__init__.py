"""Operations of cuBLAS, NCCL and torch: matmuls and collectives, with their epilogues."""
