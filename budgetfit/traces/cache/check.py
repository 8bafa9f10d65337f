"""Check whether traces can be cached in this environment; run by ``doctor``.

Prints why a small transformers model has no cache key (then no model has); empty if it
has one.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from budgetfit.gpus.table import find_gpu
from budgetfit.traces.cache.key import why_not_cacheable
from budgetfit.workload.workload import Workload

MARK = "budgetfit-cache:"


def why_not_cached() -> str:
    """Return the reason; empty if traces can be cached."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    return why_not_cacheable(Workload(model=model, batch=batch, gpu=find_gpu("t4")))


if __name__ == "__main__":
    print(f"\n{MARK}{why_not_cached()}")  # noqa: T201 - read by ``doctor``
