"""LoRA matrices, made by peft itself, with or without weights.

In come a model and an ``Adapter``; out comes peft's model. Open ``peft.py`` first.
"""
