"""Training loops that are traced: plain PyTorch, and those of installed libraries.

In: a fake model, a recipe and a ``core.loop.Loop``. Out: a runner, whose ``run`` trains
until enough steps are traced. A library's loop is the installed library's own code
(``Trainer.train``, ``lightning.Trainer.fit``), given a loader whose batches appear on
the device when the library moves them there; so every name that it holds is held here.
Open ``prepare.py`` first.
"""
