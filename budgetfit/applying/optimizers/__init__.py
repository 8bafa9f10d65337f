"""Make the optimizer that a recipe names: of torch, bitsandbytes, torchao, on the CPU.

In come a recipe's words and parameters; out comes a ``torch.optim.Optimizer``, real or
one that allocates the same on fake tensors. Open ``factory.py`` first.
"""
