"""Whether traces can be kept here at all; run as a program of its own, by ``doctor``.

It prints what keeps a small model of transformers from having a key: where that has
none, nothing else has. Empty where all is well.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from budgetfit.gpus.table import find_gpu
from budgetfit.traces.cache.key import why_not_cacheable
from budgetfit.workload.workload import Subject

MARK = "budgetfit-cache:"


def why_not_kept() -> str:
    """Return the reason, or nothing."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    return why_not_cacheable(Subject(model=model, batch=batch, gpu=find_gpu("t4")))


if __name__ == "__main__":
    print(f"\n{MARK}{why_not_kept()}")  # noqa: T201 - its answer
