"""`nn.Module`s whose collectives overlap with their matmuls: linear layers, query, key and value, the SwiGLU MLP."""
