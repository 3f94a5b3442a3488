"""`nn.Module`s whose collectives run beside their matmuls: linear layers, query, key and value, the SwiGLU MLP."""
