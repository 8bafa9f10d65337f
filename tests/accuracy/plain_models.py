"""Models written in plain PyTorch, each returning an object with ``loss``.

They cover what transformers models do not: attention called directly, torch's own
``nn.Transformer`` layers.
"""
