"""``Subject``: the model, its batch, its loss and the GPU, as they are planned for.

In come live objects; out comes one value that is traced, and the check that a model is
still the planned one. Open ``workload.py`` first.
"""
