"""Tracing: a training step on fake tensors that behaves like CUDA, as numbers."""
