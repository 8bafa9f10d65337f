"""What users read: values in, text or JSON out. Nothing here computes a number.

Open ``render.py`` first, and ``plan_text.py`` for the report of a plan.
"""
