"""Tables about a model or a plan: why a block is treated so, and every layer.

In come a plan or a model; out come rows without words. Open ``block_report.py`` first.
"""
