torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b \
  --parallelism.tensor_parallel_degree 8 --override.imports \
  overweave.adapters.torchtitan.qkv,overweave.adapters.torchtitan.row_parallel,overweave.adapters.torchtitan.feed_forward
