"""Measure what each option of each block costs, from traces of the model.

In comes a ``Workload``; out comes a ``BlockChain``: its profile at any batch size. Open
``block_chain.py`` first.
"""
