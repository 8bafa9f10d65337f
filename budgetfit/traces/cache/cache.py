"""TraceCache: traces on disk.

A key hashes everything that a trace depends on, so entries never become stale. A file
is one npz: arrays and a JSON header, no pickle.
"""

import json
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from budgetfit.core.step_trace import (
    Affine,
    BlockPass,
    KernelScratch,
    OpTable,
    Phase,
    SizeLimit,
    StepTrace,
    UnverifiedOp,
)
from budgetfit.traces.cache.folder import CacheFolder

FORMAT: Final = "budgetfit trace 1"
# Traces are repetitive, so this level suffices; higher ones take several times as long.
_COMPRESSION: Final = 1
_LARGEST_BYTES: Final = 2**31  # of one array, unpacked
_HEAD: Final = "head"
_OPS: Final = "ops."


class TraceCache(CacheFolder):
    """The traces of the cache's folder."""

    suffix = ".npz"

    def load(self, key: str | None) -> StepTrace | None:
        """Return the trace stored under ``key``; None if there is none."""
        return self.read(key, read_trace)

    def store(self, key: str | None, trace: StepTrace) -> None:
        """Store ``trace`` under ``key``, if possible."""
        self.write(key, lambda file, key: write_trace(file, key, trace))


def write_trace(file: IO[bytes], key: str, trace: StepTrace) -> None:
    """Write a trace with its key."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    plain: dict[str, Any] = {}
    for item in fields(StepTrace):
        content = getattr(trace, item.name)
        if isinstance(content, OpTable):
            for column in fields(OpTable):
                arrays[_OPS + column.name] = getattr(content, column.name)
        elif isinstance(content, np.ndarray):
            arrays[item.name] = content
        else:
            plain[item.name] = content
    # Thousands of scratch rows have only a few distinct values.
    rows = {row: n for n, row in enumerate(dict.fromkeys(trace.scratch))}
    plain["scratch"] = list(rows)
    arrays["scratch_rows"] = np.array([rows[row] for row in trace.scratch], np.int64)
    head = json.dumps({"format": FORMAT, "key": key, "trace": plain})
    arrays[_HEAD] = np.frombuffer(head.encode(), np.uint8)
    with zipfile.ZipFile(
        file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION
    ) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_trace(path: Path, key: str) -> StepTrace:
    """Read a trace that ``write_trace`` wrote with ``key``.

    Raises:
        Exception: Of any kind, if the file is damaged, foreign or of another key.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.file_size > _LARGEST_BYTES:
                raise ValueError(entry.filename)
            with archive.open(entry) as member:
                arrays[entry.filename.removesuffix(".npy")] = np.lib.format.read_array(
                    member, allow_pickle=False
                )
                if member.read(1):  # at the end zipfile compares the checksum
                    raise ValueError(entry.filename)
    head = json.loads(arrays.pop(_HEAD).tobytes())
    if (head["format"], head["key"]) != (FORMAT, key):
        raise ValueError(head["key"])
    plain = head["trace"]
    rows = [
        KernelScratch(rule, tuple(Affine(*pair) for pair in arguments), part)
        for rule, arguments, part in plain.pop("scratch")
    ]
    scratch = tuple(rows[row] for row in arrays.pop("scratch_rows").tolist())
    columns = {
        name.removeprefix(_OPS): arrays.pop(name)
        for name in list(arrays)
        if name.startswith(_OPS)
    }
    phases = tuple(Phase(*row) for row in plain.pop("phases"))
    passes = tuple(BlockPass(*row) for row in plain.pop("passes"))
    limits = tuple(
        SizeLimit(op, what, Affine(*number), most, source)
        for op, what, number, most, source in plain.pop("size_limits")
    )
    unverified = tuple(
        UnverifiedOp(name, tuple(storages))
        for name, storages in plain.pop("unverified_ops")
    )
    content: dict[str, Any] = {
        name: tuple(items) if isinstance(items, list) else items
        for name, items in plain.items()
    }
    content |= arrays
    return StepTrace(
        scratch=scratch,
        phases=phases,
        passes=passes,
        unverified_ops=unverified,
        size_limits=limits,
        ops=OpTable(**columns),
        **content,
    )
