"""General helpers without torch: format bytes, deepcopy, lazy imports, RNG state."""
