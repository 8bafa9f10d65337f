"""Build optimizers: of torch, transformers, bitsandbytes and torchao.

In come a recipe and parameters; out comes a ``torch.optim.Optimizer``, real or
one that allocates the same on fake tensors. Open ``factory.py`` first.
"""
