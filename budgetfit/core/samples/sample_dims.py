"""``batch_dims``: the sample dimension of each tensor of a batch.

Like ``torch.vmap``'s ``in_dims``: one dimension for all tensors, or one for each named
part; None for parts shared by all samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeGuard

from budgetfit.core.validation import python_number
from budgetfit.errors import InputError

SINGLE_TENSOR: Final = "batch"  # the path of a batch that is a single tensor
_MOST_NAMED: Final = 12
_EXAMPLE: Final = 'batch_dims={"input_ids": 0, "class_weights": None}'


# As given: for all tensors, or by the names of parts; None: not given.
BatchDims: TypeAlias = int | Mapping[str, int | None] | None


@dataclass(frozen=True, slots=True)
class SampleDims:
    """The sample dimension of each tensor of a batch.

    Attributes:
        default: Of unnamed parts, if their size in that dimension is the batch size.
        named: By path. A container's name applies to everything in it that is not named
            itself, the empty name to the whole batch. None: shared by all samples.
    """

    default: int = 0
    named: dict[str, int | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: object, default: int) -> SampleDims:
        """Parse the ``batch_dims`` argument.

        Args:
            given: A dimension for all tensors, or one by name; or None.
            default: The sample dimension of the model's inputs.

        Raises:
            InputError: If it is neither.
        """
        if given is None:
            return cls(default)
        given = python_number(given)
        if _is_dimension(given):
            return cls(given, {"": given})
        named: Any = given
        if isinstance(given, Mapping):
            named = {name: python_number(dim) for name, dim in given.items()}
        if not isinstance(named, Mapping) or not all(
            isinstance(name, str) and name and (dim is None or _is_dimension(dim))
            for name, dim in named.items()
        ):
            raise InputError(
                "batch_dims must be a dimension, counted from 0, or one for each name, "
                f"None for what goes with every sample: {_EXAMPLE}; got {given!r:.80}."
            )
        return cls(default, dict(named))

    def of(self, path: str) -> int | None:
        """Return the sample dimension of a part, if it has samples."""
        name = self._name(path)
        return self.default if name is None else self.named[name]

    def sample_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a tensor's shape without its sample dimension."""
        dim = self.of(path)
        return shape if dim is None else (*shape[:dim], *shape[dim + 1 :])

    def is_named(self, path: str) -> bool:
        """Whether a part, or a container of it, is named."""
        return self._name(path) is not None

    def names_below(self, path: str) -> bool:
        """Whether a part of a container is named."""
        start = f"{path}." if path else ""
        return any(name and name.startswith(start) for name in self.named)

    def check_names(self, paths: Iterable[str]) -> None:
        """Check that every name is a part of the batch, by paths of its tensors."""
        known = list(paths)
        for name in self.named:
            if name and not any(f"{path}.".startswith(f"{name}.") for path in known):
                there = ", ".join(known[:_MOST_NAMED]) or "no tensors"
                more = ", ..." if len(known) > _MOST_NAMED else ""
                raise InputError(
                    f"batch_dims names {name!r}, which the batch does not have; it has "
                    f"{there}{more}. Use the names that plans show."
                )

    def agreed_batch_size(
        self,
        named: Mapping[str, tuple[int, ...]],
        votes: Mapping[int, int],
    ) -> int:
        """Return the batch size on which the named parts agree.

        ``named``: possible batch sizes of each part, by its path. ``votes``: how many
        parts allow a batch size: decides between several.

        Raises:
            InputError: They do not agree.
        """
        common = set.intersection(*map(set, named.values()))
        left = [size for size in next(iter(named.values())) if size in common]
        if left:
            return max(left, key=lambda size: votes[size])
        sizes = ", ".join(
            f"{path} {' or '.join(map(str, allowed))}"
            for path, allowed in list(named.items())[:_MOST_NAMED]
        )
        raise InputError(
            "The parts that batch_dims names hold different numbers of samples: "
            f"{sizes}. Name the dimension that counts samples in each, or None for "
            "what goes with every sample."
        )

    def missing_dim_error(self, path: str, shape: tuple[int, ...]) -> InputError:
        """Return the error for a tensor without the dimension that was named."""
        return InputError(
            f"batch_dims says that {path} counts samples in dimension "
            f"{self.of(path)}, but its shape is {list(shape)}. Name one that it has, "
            "counted from 0, or None for what goes with every sample."
        )

    def _name(self, path: str) -> str | None:
        """Return the longest name that contains a part."""
        while path not in self.named:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return path


def _is_dimension(given: object) -> TypeGuard[int]:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


FIRST_DIM: Final = SampleDims()  # the first one, and nothing is named
