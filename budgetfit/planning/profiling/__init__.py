"""What each option of each block costs, from traces of the model.

In comes a model's first trace; out come ``Chains``: profiles at any batch size. Open
``block_chain.py`` first.
"""
