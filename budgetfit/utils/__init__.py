"""Small helpers that belong to no part of the story. Nothing here imports torch.

Bytes as text, copies of models, late imports, whose code is whose.
"""
