"""The figures of the report, one file each: ``section`` draws it, with its table.

Takes a plan; None where it does not have what the figure shows. Open
``step_memory.py`` first.
"""
