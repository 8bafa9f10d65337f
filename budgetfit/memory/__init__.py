"""Bytes of a training step: the caching allocator, and the replay that judges plans."""
