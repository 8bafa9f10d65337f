"""Trace one rank of many: PyTorch's own DDP and FSDP2 on fake tensors.

The wrapped model runs under torch's fake process group, whose collectives do nothing;
rank 0 has the largest shards, so it stands for all. Start with ``one_rank.py``.
"""
