"""``Workload``: the model, batch, loss, optimizer and GPU that a plan is made for.

Also the checks that a model handed in later is the planned one, and where diffusers
puts LoRA. Open ``workload.py`` first.
"""
