"""Parse and validate user input: GPU, limits, model, batch, adapter, saved plans.

In come keywords and command-line values; out come a ``Workload``, a ``Budget``, an
``Adapter`` and the search's settings, or one ``InputError``. Open ``arguments.py``
first.
"""
