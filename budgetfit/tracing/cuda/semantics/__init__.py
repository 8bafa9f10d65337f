"""What a CUDA kernel returns and allocates, op by op.

In comes an op call; out come its result and its extra allocations. Open ``context.py``
first.
"""
