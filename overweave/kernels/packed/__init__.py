"""The kernels of packed messages: each message carries its flag."""
