"""Where diffusers' training scripts put LoRA: the projections of attention."""

from collections.abc import Iterator
from typing import Final

from torch import nn

from budgetfit.example_batches.diffusion import is_diffusers_model

# Of diffusers' attention: of the sample's states, then of the text's added ones.
# Source: the ``target_modules`` of ``examples/dreambooth/train_dreambooth_lora_*.py``.
_PROJECTIONS: Final = (
    *("to_q", "to_k", "to_v", "to_out.0", "to_out", "to_qkv_mlp_proj"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
)


def attention_projections(model: nn.Module) -> tuple[str, ...]:
    """Return ``target_modules`` for a model of diffusers; none for other models.

    They are ends of module names, but full names where an end stands for a list of
    layers in other blocks (``to_out``).
    """
    return tuple(_targets(model)) if is_diffusers_model(model) else ()


def _targets(model: nn.Module) -> Iterator[str]:
    modules = dict(model.named_modules())
    for end in _PROJECTIONS:
        found = {
            name: module
            for name, module in modules.items()
            if name == end or name.endswith(f".{end}")
        }
        linear = [name for name, part in found.items() if isinstance(part, nn.Linear)]
        if linear and len(linear) == len(found):
            yield end
        else:
            yield from linear
