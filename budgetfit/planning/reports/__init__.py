"""Report tables: options of each block, and memory of each layer.

In come a plan or a model; out come rows of numbers. Open ``block_report.py`` first.
"""
