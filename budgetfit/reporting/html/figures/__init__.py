"""The figures of the report, one file each: ``section(plan)`` draws it, with its table.

None where a plan does not have what it shows.
"""
