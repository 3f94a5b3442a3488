OVERWEAVE_INSTALL=1 vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 8
