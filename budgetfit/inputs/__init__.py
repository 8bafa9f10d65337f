"""Parse and validate user input: GPU, limits, model, batch, adapter, saved plans.

In come keywords and command-line values; out come ``Subject``, ``Budget``, ``Adapter``
and the search's settings, or one ``InputError``. Open ``settings.py`` first.
"""
