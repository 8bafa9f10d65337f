"""``Workload``: the model, batch, loss, optimizer and GPU that a plan is made for.

Also the checks that a model handed in later is the planned one. Open ``workload.py``
first.
"""
