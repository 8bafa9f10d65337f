"""Export plans to Trainer, TRL, accelerate, Lightning, DeepSpeed and YAML configs.

In comes a ``Plan``; out come the library's objects or the text of its config file. Open
``trainer.py`` first.
"""
