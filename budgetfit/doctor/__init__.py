"""Whether an installation can train: what is wrong, what it means, what to do.

``facts`` holds plain values, ``gather`` and ``probe`` find them on a machine, and the
``judge`` files turn them into findings. Nothing here imports torch: libraries are tried
in processes of their own, because the ones that matter are the ones that break.
"""
