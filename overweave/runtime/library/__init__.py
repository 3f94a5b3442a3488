"""What a library runs: collectives and matmuls of torch, with the epilogues behind them."""
