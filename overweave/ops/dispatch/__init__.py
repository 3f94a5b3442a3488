"""The operators in torch's dispatcher, `torch.ops.overweave`: schemas, kernels, fake kernels, gradients, autocast."""
