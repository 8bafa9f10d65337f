"""The table of GPUs: memory, rates, CUDA context, and which torch supports them.

In comes a name as users write it; out comes a ``Gpu`` with its figures and sources.
Open ``table.py`` first; the figures are in ``gpus.toml``.
"""
