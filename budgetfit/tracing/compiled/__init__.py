"""Blocks under torch.compile, traced without a GPU.

In comes a block of a traced model; out goes a forward that runs the code that inductor
generates for a CUDA GPU, on fake tensors: its buffers and the order in which they are
freed are those of training with ``torch.compile`` on that GPU. Open
``compiled_blocks.py`` first.
"""
