"""What CUDA would do where a trace on fake CPU tensors does not (tracing T4)."""
