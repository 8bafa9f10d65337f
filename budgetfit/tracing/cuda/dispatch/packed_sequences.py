"""``pad_packed_sequence`` on fake tensors: pad the outputs of a recurrent layer.

Torch's C++ writes the lengths into a tensor that it has just allocated. In a trace that
is a fake tensor without memory.

Source: ``_pad_packed_sequence`` in ``aten/src/ATen/native/PackedSequence.cpp``.
"""

import itertools

import torch
from torch.utils._python_dispatch import _disable_current_modes


def pad_packed_sequence(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded rows and, in host memory, the length of each sample."""
    # Consecutive time steps with the same number of samples are copied at once.
    with _disable_current_modes():
        counts = batch_sizes.tolist()
        samples = torch.arange(counts[0])[:, None]
        lengths = (samples < batch_sizes).sum(1)
    steps = max(len(counts), total_length)
    output = data.new_full((steps, counts[0], *data.shape[1:]), padding_value)
    step = row = 0
    for count, group in itertools.groupby(counts):
        length = len(list(group))
        rows = data.narrow(0, row, length * count)
        target = output.narrow(0, step, length).narrow(1, 0, count)
        target.copy_(rows.view(length, count, *data.shape[1:]))
        step, row = step + length, row + length * count
    return (output.transpose(0, 1) if batch_first else output), lengths
