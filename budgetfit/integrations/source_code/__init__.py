"""Export a plan as Python source: load the model, train it with plain torch.

In comes a ``Plan``; out comes the text of a program that needs no budgetfit. Open
``plain_torch.py`` first.
"""
