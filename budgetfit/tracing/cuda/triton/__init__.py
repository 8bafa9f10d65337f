"""Triton kernels in a trace: libraries of them (Liger, TRL) and those of a model.

In: nothing; the context of ``launches.py`` is open during a trace. Out: one op,
``budgetfit::triton_kernel``, for each launch. The Python around the launches, which
allocates what the kernels write to, runs as it is. Open ``launches.py`` first.
"""
