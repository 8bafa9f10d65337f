"""A plan for other trainers: Trainer, TRL, accelerate, Lightning, DeepSpeed, YAML.

In comes a ``Plan``; out come that library's objects or the text of a file for it. Open
``trainer.py`` first.
"""
