"""The ``budgetfit`` command: typer commands, their options, output and exit codes.

In come words typed in a terminal; out goes text or JSON. Each command calls ``api``.
Open ``app.py`` first.
"""
