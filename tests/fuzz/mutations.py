"""Ways to damage a saved plan: what hands, editors, disks and strangers do to it."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Path = tuple[str | int, ...]

# What an author of a plan file would write to have code run where it is exported.
INJECTION = 'x"""\n"\'; \nINJECTED = __import__("os").getpid()\n#'
TEXTS = (
    "",
    " ",
    "8",
    "auto",
    "ünï☃\u202e",
    "[/red]",
    "[bold",
    "%s {0} {x} ${name}",
    "a\nb\tc\x1b[31m",
    "\ud800",
    "nan",
    "../../etc/passwd",
    "__import__('os').getpid()",
    "os.system",
    "file.py:build",
    "x" * 20_000,
    INJECTION,
    INJECTION,
)
NUMBERS = (
    *(0, -1, 1, 2, 3, -0.0, 0.5, 1.5, 7, 513, 2**31, 2**53 + 1, 2**63, 2**64),
    *(-(2**63), 10**30, 10**400, 1e-300, 1e300, -1e300),
    *(float("nan"), float("inf"), -float("inf")),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [None], {"a": 1}, [[[]]])
# Stand in for text that json.dumps would not write.
_RAW = {
    "RAW-DIGITS": "9" * 5000,
    "RAW-OVERFLOW": "1e999",
    "RAW-BOMB": "[" * 50_000 + "]" * 50_000,
    "RAW-OBJECTS": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "RAW-MINUS-ZERO": "-0",
    "RAW-HEX": "0x10",
}


def mutated(rng: random.Random, plans: dict[str, dict[str, Any]]) -> tuple[str, bytes]:
    """Return what was done to which plan, and the file that came of it."""
    name = rng.choice(sorted(plans))
    document = copy.deepcopy(plans[name])
    if rng.random() < 0.3:
        damage = rng.choice(FILE_DAMAGE)
        return f"{name}: {damage.__name__}", damage(rng, _text(document).encode())
    done = [_change(rng, document, plans) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    text = _text(document)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return f"{name}: {'; '.join(done)}", text.encode()


def _text(document: object) -> str:
    return json.dumps(document, indent=1)


def places(document: object, path: Path = ()) -> list[Path]:
    """Return the way to each value in a document, containers included."""
    found = [path] if path else []
    if isinstance(document, dict):
        for key, value in document.items():
            found += places(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            found += places(value, (*path, index))
    return found


def _change(
    rng: random.Random, document: dict[str, Any], plans: dict[str, dict[str, Any]]
) -> str:
    """Change one place; most of a document is its timelines, which come last."""
    path = _place(rng, document)
    home = at(document, path[:-1])
    key = path[-1]
    change = rng.choice(CHANGES)
    change(rng, home, key, plans)
    return f"{change.__name__.strip('_')} at {'.'.join(map(str, path))}"


def _place(rng: random.Random, document: dict[str, Any]) -> Path:
    often = [key for key in ("recipe", "model", "gpu", "provenance") if key in document]
    path: Path = (rng.choice([*document, *often]),)
    while True:
        value = at(document, path)
        inside = list(value) if isinstance(value, dict) else []
        if isinstance(value, list):
            inside = list(range(len(value)))
        if not inside or rng.random() < 0.1:
            return path
        path = (*path, rng.choice(inside))


def at(document: Any, path: Path) -> Any:
    """Return what stands at a place."""
    for part in path:
        document = document[part]
    return document


def _another_value(rng: random.Random, home: Any, key: Any, _: object) -> None:
    home[key] = rng.choice([*TEXTS, *NUMBERS, *OTHERS, *_RAW])


def _another_text(rng: random.Random, home: Any, key: Any, _: object) -> None:
    home[key] = rng.choice(TEXTS)


def _another_number(rng: random.Random, home: Any, key: Any, _: object) -> None:
    home[key] = rng.choice([*NUMBERS, *(mark for mark in _RAW)])


def _slightly_more(rng: random.Random, home: Any, key: Any, _: object) -> None:
    if isinstance(home[key], (int, float)) and abs(home[key]) < 2**64:
        home[key] = rng.choice(
            (home[key] + 1, -home[key], home[key] * 2, home[key] / 2)
        )
    elif isinstance(home[key], str):
        home[key] += rng.choice(("x", ".", " ", "\n"))


def _another_type(rng: random.Random, home: Any, key: Any, _: object) -> None:
    value = home[key]
    home[key] = rng.choice((str(value), [value], {"value": value}, value is None))


def _missing(_: random.Random, home: Any, key: Any, __: object) -> None:
    del home[key]


def _extra(rng: random.Random, home: Any, key: Any, _: object) -> None:
    if isinstance(home, dict):
        home[rng.choice(("extra", "__class__", "source", "", f"{key} "))] = home[key]
    else:
        home.insert(rng.randrange(len(home) + 1), home[key])


def _renamed(rng: random.Random, home: Any, key: Any, _: object) -> None:
    if isinstance(home, dict):
        home[rng.choice((key.upper(), key + "s", INJECTION, "\ud800"))] = home.pop(key)


def _of_another_plan(
    rng: random.Random, home: Any, key: Any, plans: dict[str, dict[str, Any]]
) -> None:
    other = plans[rng.choice(sorted(plans))]
    home[key] = copy.deepcopy(at(other, _place(rng, other)))


def _same_of_another_plan(
    rng: random.Random, home: Any, key: Any, plans: dict[str, dict[str, Any]]
) -> None:
    for name in rng.sample(sorted(plans), len(plans)):
        for path in places(plans[name]):
            if path[-1] == key:
                home[key] = copy.deepcopy(at(plans[name], path))
                return


CHANGES: tuple[Callable[..., None], ...] = (
    _another_value,
    _another_value,
    _another_text,
    _another_number,
    _slightly_more,
    _slightly_more,
    _another_type,
    _missing,
    _extra,
    _renamed,
    _of_another_plan,
    _same_of_another_plan,
)


def truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(rng: random.Random, data: bytes) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 50))):
        result[rng.randrange(len(result))] ^= 1 << rng.randrange(8)
    return bytes(result)


def digit_changed(rng: random.Random, data: bytes) -> bytes:
    digits = [n for n, byte in enumerate(data) if chr(byte).isdigit()]
    result = bytearray(data)
    result[rng.choice(digits)] = ord(rng.choice("0123456789-.eE"))
    return bytes(result)


def line_twice(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    return b"".join([*lines[: number + 1], *lines[number:]])


def line_gone(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def key_twice(rng: random.Random, data: bytes) -> bytes:
    lines = data.decode().splitlines(keepends=True)
    keyed = [n for n, line in enumerate(lines) if line.rstrip().endswith(",")]
    keyed = [n for n in keyed if ":" in lines[n]]
    number = rng.choice(keyed)
    key = lines[number].split(":")[0]
    lines.insert(number, f"{key}: {rng.choice((3, 'null', '[]'))},\n")
    return "".join(lines).encode()


def written_otherwise(rng: random.Random, data: bytes) -> bytes:
    text = data.decode()
    return rng.choice(
        (
            text.encode("utf-16"),
            text.encode("utf-8-sig"),
            text.replace("\n", "\r\n").encode(),
            json.dumps(json.loads(text), ensure_ascii=False).encode(),
            (text + text).encode(),
            b"[" + data + b"]",
            b"\0" + data,
            b"",
            b"null",
            b'"plan"',
            b"[" * 100_000,
            b'{"format": 1}',
            b'{"format": 1' + b', "a": {"a"' * 1000,
            repr(json.loads(text)).encode(),
            b"\x80\x04\x95" + data[:100],
        )
    )


FILE_DAMAGE: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    truncated,
    flipped,
    digit_changed,
    line_twice,
    line_gone,
    key_twice,
    written_otherwise,
)
