"""Parse command-line values: comma lists, block names, batch dims, lengths files.

What can be validated without torch, whose import takes seconds, is validated first.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from budgetfit.core.validation import check_samples, is_whole
from budgetfit.errors import InputError


def one_or_list(text: str) -> str | list[str]:
    """Split ``"fp32,bf16-mixed"`` into a list to compare; keep a single value."""
    return [part.strip() for part in text.split(",")] if "," in text else text


def policy_or_blocks(text: str) -> str | Sequence[str]:
    """Parse a policy, or block names (with commas, dots or digits)."""
    if text.startswith("every-") and "," not in text:
        return text
    if any(sign in ",." or sign.isdecimal() for sign in text):
        return split_names(text)
    return text


def split_names(text: str) -> list[str]:
    """Split ``"t4, l4"`` into names."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_batch_dims(words: Sequence[str] | None) -> int | dict[str, int | None] | None:
    """Parse ``--batch-dims`` (``x=0`` and ``table=none``, or ``1``), or refuse it."""
    if not words:
        return None
    if len(words) == 1 and is_whole(words[0]):
        return int(words[0])
    named: dict[str, int | None] = {}
    for word in words:
        name, _, dim = word.rpartition("=")
        if not name or name in named or not (is_whole(dim) or dim.lower() == "none"):
            raise InputError(
                f"--batch-dims takes NAME=DIM, once for each name, with a dimension "
                f"counted from 0 or none: --batch-dims x=0 --batch-dims table=none; "
                f"got {word!r:.60}."
            )
        named[name] = None if dim.lower() == "none" else int(dim)
    return named


def parse_prices(words: Sequence[str]) -> list[tuple[str, str]]:
    """Split ``--price`` at each ``=`` into cards and prices; several with commas."""
    pairs = []
    for word in [part for each in words for part in each.split(",")]:
        name, equals, price = word.partition("=")
        if not equals:
            raise InputError(
                "--price takes CARD=PRICE per hour, several with commas, and decimals "
                f"behind a point, such as --price t4=0.35,l4=0.80; got {word!r:.60}."
            )
        pairs.append((name, price))
    return pairs


def read_lengths(path: Path | None) -> dict[int, int] | None:
    """Read samples by length from a file: ``512`` or ``512 900`` in each line.

    Lengths with commas, ``512,1024``, are taken as they are if no file has that name.

    Raises:
        InputError: If it cannot be read, or a line is neither.
    """
    if path is None:
        return None
    words = split_names(str(path))
    if all(map(is_whole, words)) and not path.exists():
        return dict(Counter(map(int, words)))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"Cannot read lengths from {str(path)!r}: {error}. Hand in a text file "
            "with one length in each line, or lengths with commas: 512,1024."
        ) from None
    counted: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if words[2:] or not all(map(is_whole, words)):
            raise InputError(
                f"Line {number} of {str(path)!r} is {line.strip()[:40]!r}. Write one "
                'length in each line, "512", or length and number of samples, '
                '"512 900".'
            )
        length, count = int(words[0]), int(words[1]) if len(words) > 1 else 1
        counted[length] = counted.get(length, 0) + count
    return counted


def arguments_of(
    given: Mapping[str, Any], samples: int | None = None
) -> dict[str, Any]:
    """Return the arguments of ``budgetfit.plan`` that options stand for.

    What can be is validated without torch; the api validates all of it again, with the
    same functions. Of a model only an existing file with a config or a factory is
    checked, no hub id.

    Raises:
        InputError: For the first invalid option.
    """
    # Imported here to keep --help fast.
    from budgetfit.core.precision import find_precision, requested_precisions
    from budgetfit.core.units import parse_bytes
    from budgetfit.core.validation import check_batch, check_objective
    from budgetfit.gpus.hourly_prices import hourly_prices
    from budgetfit.gpus.interconnect import check_link
    from budgetfit.gpus.table import find_gpu
    from budgetfit.inputs.several_gpus import find_counted_gpu
    from budgetfit.integrations.model_sources.model_name import check_model_text

    check_objective(given.get("objective", "throughput"))
    check_batch(given.get("batch_size"), given.get("effective_batch_size"))
    for name, none in (("vram", None), ("headroom", "0")):
        if given.get(name) not in (None, none):
            parse_bytes(given[name])
    if given.get("link") is not None:
        check_link(given["link"])
    several = given.get("gpus")  # of compare: cards
    named = several if isinstance(several, (list, tuple)) else ()
    gpus = [find_counted_gpu(name).gpu for name in named]
    if not gpus and given.get("gpu") is not None:
        gpus = [find_gpu(given["gpu"])]
    precision = given.get("precision", "auto")
    if len(gpus) == 1:
        requested_precisions(precision, gpus[0])
    else:  # each GPU of a comparison reports what it cannot compute in
        for name in [precision] if isinstance(precision, str) else precision:
            if name != "auto":
                find_precision(name)
    if given.get("model") is not None:
        check_model_text(given["model"])
    check_samples(samples)
    read: dict[str, Callable[[Any], Any]] = {
        "batch_dims": parse_batch_dims,
        "lengths": read_lengths,
        "prices": lambda words: hourly_prices(parse_prices(words or ()), gpus),
    }
    return {
        name: read[name](value) if name in read else value
        for name, value in given.items()
    }
