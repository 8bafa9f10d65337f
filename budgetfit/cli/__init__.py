"""The ``budgetfit`` command: typer commands, their options, output and exit codes.

In come command lines; out goes text or JSON. Each command calls ``api``.
Open ``app.py`` first.
"""
