"""Solvers that choose for each block what to keep, recompute or offload.

A solver takes a ``Problem`` and returns a ``Solution``; a new one is a file here and a
row in the table of tests/solvers/test_laws.py, whose laws it then has to keep. Open
``problem.py`` and ``chain_dp.py`` first.
"""
