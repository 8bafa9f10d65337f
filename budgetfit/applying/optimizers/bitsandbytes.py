"""bitsandbytes' optimizers: the library where a model trains, a stand-in in traces.

The library cannot step fake tensors, and planning must not need it. What decides memory
is which states it makes, by tensor, and in what order; that is repeated here. Source:
``bitsandbytes/optim/optimizer.py`` and ``ademamix.py`` of 0.50.2: ``init_state``,
``update_step``, ``get_state_buffer``. A step takes no memory of its own: one kernel for
each tensor, in place.

Assumed: a version whose blocks have 256 elements, and no overrides by the library's
``GlobalOptimManager`` (``TRAINER_NOTE``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._subclasses import FakeTensor

from budgetfit.applying.optimizers.library import import_to_train

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_ELEMENTS: Final = 256  # that share one fp32 scale
LEAST_8BIT_ELEMENTS: Final = 4096  # smaller tensors keep fp32 states
LEAST_PAGED_ELEMENTS: Final = 100_000
CODE_VALUES: Final = 256  # of a quantization table, fp32
BETAS: Final = (0.9, 0.999)  # transformers' adam_beta1 and adam_beta2

PAGED_NOTE: Final = (
    "states of tensors with 100,000 or more elements are CUDA managed memory, outside "
    "PyTorch's allocator and this estimate; the driver moves them to host memory when "
    "the card is full, at a time that is not counted"
)
TRAINER_NOTE: Final = (
    "transformers' Trainer keeps the states of embeddings in 32 bits; this estimate, "
    "like budgetfit.apply, has them in 8"
)


class Rules(NamedTuple):
    """What decides an optimizer's states.

    Attributes:
        kind: Name of the class in ``bitsandbytes.optim``.
        states: Of the size of a tensor: 1 or 2; AdEMAMix's first is twice as large.
        bits: 8 or 32.
        is_paged: Whether states of large tensors are managed memory.
        least_8bit_elements: Smaller tensors keep fp32 states.
        clips_updates: Whether it keeps the norm of a tensor's updates (LAMB, LARS).
    """

    kind: str
    states: int
    bits: int
    is_paged: bool = False
    least_8bit_elements: int = LEAST_8BIT_ELEMENTS
    clips_updates: bool = False

    @property
    def has_double_state(self) -> bool:
        """Whether the first state holds two averages."""
        return self.kind.startswith("AdEMAMix")


# transformers' names, as Trainer.get_optimizer_cls_and_kwargs takes them apart.
RULES: Final = {
    "adamw_bnb_8bit": Rules("AdamW", 2, 8),
    "adamw_8bit": Rules("AdamW", 2, 8),
    "paged_adamw_8bit": Rules("AdamW", 2, 8, is_paged=True),
    "paged_adamw_32bit": Rules("AdamW", 2, 32, is_paged=True),
    "ademamix": Rules("AdEMAMix", 2, 32),
    "ademamix_8bit": Rules("AdEMAMix", 2, 8),
    "paged_ademamix_32bit": Rules("AdEMAMix", 2, 32, is_paged=True),
    "paged_ademamix_8bit": Rules("AdEMAMix", 2, 8, is_paged=True),
    "lion_32bit": Rules("Lion", 1, 32),
    "lion_8bit": Rules("Lion", 1, 8),
    "paged_lion_32bit": Rules("Lion", 1, 32, is_paged=True),
    "paged_lion_8bit": Rules("Lion", 1, 8, is_paged=True),
    "rmsprop_bnb": Rules("RMSprop", 1, 32),
    "rmsprop_bnb_8bit": Rules("RMSprop", 1, 8),
    "rmsprop_bnb_32bit": Rules("RMSprop", 1, 32),
}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "AdamW": {"betas": BETAS, "eps": 1e-8},
    "AdEMAMix": {"betas": (*BETAS, 0.9999), "alpha": 5.0, "eps": 1e-8},
    "Lion": {"betas": BETAS},
    "RMSprop": {},
}

# An op of our own, so that the roofline sees the bytes that a step moves. It never runs
# on real tensors. A fragment: several files define ops of this namespace.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")
_LIBRARY.define(
    "bitsandbytes_step_(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states)"
    " -> ()"
)
_LIBRARY.impl("bitsandbytes_step_", lambda *_: None, "Meta")


def make(name: str, parameters: list[Any], lr: float) -> torch.optim.Optimizer:
    """Return the library's optimizer as transformers' Trainer makes it, or a stand-in.

    Raises:
        InputError: If the model is to train and bitsandbytes is not installed.
    """
    rules = RULES[name]
    if any(isinstance(parameter, FakeTensor) for parameter in parameters):
        return StandIn(parameters, rules)
    library = import_to_train(name, "bitsandbytes.optim")
    options = {**_OPTIONS[rules.kind], "weight_decay": 0.0, "optim_bits": rules.bits}
    if rules.is_paged:
        options["is_paged"] = True
    made: torch.optim.Optimizer = getattr(library, rules.kind)(
        parameters, lr=lr, **options
    )
    return made


def stand_in_for(optimizer: object) -> StandIn | None:
    """Return what stands for an optimizer of the library; None for any other."""
    families = {kind.__name__: kind.__module__ for kind in type(optimizer).__mro__}
    home = "bitsandbytes.optim.optimizer"
    if families.get("Optimizer8bit") != home:
        return None
    given: Any = optimizer
    rules = Rules(
        "AdEMAMix" if given.optimizer_name == "ademamix" else type(given).__name__,
        2 if families.get("Optimizer2State") == home else 1,
        given.args.optim_bits,
        given.is_paged,
        given.args.min_8bit_size,
        given.args.max_unorm > 0,
    )
    return StandIn(given.param_groups, rules)


class StandIn(torch.optim.Optimizer):
    """Makes the library's states on fake tensors, and changes no value.

    Args:
        parameters: Fake tensors, or groups of them.
        rules: Which states.

    Attributes:
        managed_bytes: Of states in managed memory, which no tensor here stands for.
    """

    def __init__(self, parameters: list[Any], rules: Rules) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.managed_bytes = 0
        self._rules = rules
        self._tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the states of each tensor in turn, then update it in place."""
        assert closure is None  # noqa: S101 - traced programs have none
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._make_state(parameter, state)
                if not parameter.is_contiguous():
                    parameter.data = parameter.data.contiguous()
                parameter.grad = parameter.grad.contiguous()
                # Without the tables, which all tensors share: what an op touches
                # tells whose it is.
                states = [
                    value
                    for name, value in state.items()
                    if isinstance(value, torch.Tensor) and not name.startswith("qmap")
                ]
                torch.ops.budgetfit.bitsandbytes_step_(
                    parameter, parameter.grad, states
                )

    def _make_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        rules = self._rules
        state["step"] = 0
        is_small = parameter.numel() < rules.least_8bit_elements
        dtype = torch.float32 if rules.bits == 32 or is_small else torch.uint8  # noqa: PLR2004
        if rules.has_double_state:  # it makes the scales before what they scale
            if dtype is torch.uint8:
                self._hand_out_tables(parameter, state)
                self._make_scales(parameter, state, (2,))
            state["state1"] = self._double_buffer(parameter, dtype)
            state["state2"] = self._buffer(parameter, dtype)
            return
        if dtype is torch.uint8:
            self._hand_out_tables(parameter, state)
        for number in range(1, rules.states + 1):
            state[f"state{number}"] = self._buffer(parameter, dtype)
        if dtype is torch.uint8:
            self._make_scales(parameter, state, ())
        if rules.clips_updates:
            state["unorm_vec"] = parameter.new_zeros(1, dtype=torch.float32)

    def _hand_out_tables(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Give a state the quantization tables, made for the first and shared."""
        if not self._tables:
            self._tables = [
                parameter.new_empty(CODE_VALUES, dtype=torch.float32)
                for _ in range(self._rules.states)
            ]
        for number, table in enumerate(self._tables, start=1):
            state[f"qmap{number}"] = table

    def _make_scales(
        self, parameter: torch.Tensor, state: dict[str, Any], averages: tuple[int, ...]
    ) -> None:
        blocks = -(-parameter.numel() // BLOCK_ELEMENTS)
        for number in range(1, self._rules.states + 1):
            shape = (*averages, blocks) if number == 1 else (blocks,)
            state[f"absmax{number}"] = parameter.new_zeros(shape, dtype=torch.float32)

    def _buffer(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._is_managed(parameter):
            return self._managed(parameter.numel(), dtype, parameter)
        return torch.zeros_like(parameter, dtype=dtype)

    def _double_buffer(
        self, parameter: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if self._is_managed(parameter):
            return self._managed(2 * parameter.numel(), dtype, parameter)
        return parameter.new_zeros((2, *parameter.shape), dtype=dtype)

    def _is_managed(self, parameter: torch.Tensor) -> bool:
        """Whether its states are managed memory, which is none of PyTorch's."""
        return self._rules.is_paged and parameter.numel() >= LEAST_PAGED_ELEMENTS

    def _managed(
        self, elements: int, dtype: torch.dtype, parameter: torch.Tensor
    ) -> torch.Tensor:
        self.managed_bytes += elements * dtype.itemsize
        return parameter.new_empty(0, dtype=dtype)
