"""Traces on disk: what comes back is what was stored, and trouble is a miss."""

import functools
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from budgetfit.core.parallelism import Engine, Parallelism
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import OpTable, StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.traces import session
from budgetfit.traces.cache import cache as trace_cache
from budgetfit.traces.cache import folder as files
from budgetfit.traces.cache.cache import TraceCache
from budgetfit.traces.cache.folder import CacheSize, cache_folder
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES, Mebi
from tests.planning.profiling.test_depth_extrapolation import MIB_BATCH
from tests.processes import python

KEY, OTHER = "a" * 64, "b" * 64


@functools.cache
def trace(name: str = "gpt2") -> StepTrace:
    """A real one: scratch, random blocks, two micro-batches, a recomputed block."""
    example = EXAMPLES[name]
    workload = Workload(
        model=example.model(), batch=example.batch, gpu=find_gpu("t4")
    ).with_found_blocks()
    recipe = Recipe(
        batch_size=2,
        gradient_accumulation_steps=2,
        precision="fp16-mixed",
        segments=(Segment(workload.blocks[:1]),),
    )
    return TraceSession(workload).affine(recipe)


@pytest.fixture
def cache(tmp_path: Path) -> TraceCache:
    return TraceCache(tmp_path / "traces")


def path_of(cache: TraceCache, key: str = KEY) -> Path:
    assert cache.folder is not None
    return cache.folder / f"{key}.npz"


def assert_equal(one: StepTrace, other: StepTrace) -> None:
    for field in fields(StepTrace):
        if field.name != "ops":
            left, right = getattr(one, field.name), getattr(other, field.name)
            assert (
                np.array_equal(left, right)
                if isinstance(left, np.ndarray)
                else left == right
            )
    for field in fields(OpTable):
        assert np.array_equal(
            getattr(one.ops, field.name), getattr(other.ops, field.name)
        )
    for name in ("fixed_bytes", "category", "layer", "events", "scratch_index"):
        assert getattr(one, name).dtype == getattr(other, name).dtype
    for name in ("event", "layer", "rate", "flops_fixed", "name"):
        assert getattr(one.ops, name).dtype == getattr(other.ops, name).dtype
    for name in ("scratch", "phases", "passes", "unverified_ops"):
        rows = getattr(one, name), getattr(other, name)
        assert rows[0] == rows[1]
        assert list(map(type, rows[0])) == list(map(type, rows[1]))


@pytest.mark.parametrize("name", ["gpt2", "convolutions", "mebi"])
def test_what_is_stored_comes_back(cache: TraceCache, name: str) -> None:
    assert cache.load(KEY) is None
    cache.store(KEY, trace(name))
    found = cache.load(KEY)
    assert found is not None
    assert_equal(found, trace(name))
    assert cache.load(OTHER) is None


def test_a_trace_without_anything_comes_back(cache: TraceCache) -> None:
    none = np.zeros(0, np.int64)
    empty = replace(
        trace(),
        scratch=(),
        scratch_index=none.astype(np.int32),
        events=none.astype(np.int32),
        passes=(),
        notes=("a note — not ASCII",),
    )
    cache.store(KEY, empty)
    found = cache.load(KEY)
    assert found is not None
    assert_equal(found, empty)


def test_another_process_reads_it(cache: TraceCache) -> None:
    cache.store(KEY, trace())
    code = (
        "import sys; from pathlib import Path\n"
        "from budgetfit.traces.cache.cache import TraceCache\n"
        f"found = TraceCache(Path(sys.argv[1])).load({KEY!r})\n"
        "print(len(found.events))"
    )
    found = python("-c", code, str(cache.folder), check=True)
    assert found.stdout.strip() == str(len(trace().events))


def test_reading_needs_no_torch() -> None:
    code = "import sys, budgetfit.traces.cache.cache\nprint('torch' in sys.modules)"
    found = python("-c", code, check=True)
    assert found.stdout.strip() == "False"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    """Change one byte in the middle of the largest array."""
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.compress_size)
    content = bytearray(path.read_bytes())
    content[
        entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2
    ] ^= 255
    path.write_bytes(content)


def _pickled(path: Path) -> None:
    np.savez(path, head=np.array([{"format": 1}], dtype=object))


class Bomb:
    """Unpickling it would end the tests."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (1,)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": _cut,
    "a byte changed": _flip,
    "empty": lambda path: path.write_bytes(b""),
    "no archive": lambda path: path.write_bytes(b"hello" * 99),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "an archive of pickles": _pickled,
    "somebody's arrays": lambda path: np.savez(path, x=np.zeros(3)),
    "another format": lambda path: np.savez(
        path, head=np.frombuffer(b'{"format": "2", "key": ""}', np.uint8)
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_file_is_a_miss_and_gives_way(
    cache: TraceCache, damage: Callable[[Path], object]
) -> None:
    cache.store(KEY, trace())
    damage(path_of(cache))
    assert cache.load(KEY) is None
    cache.store(KEY, trace())
    assert cache.load(KEY) is not None


def test_a_trace_under_anothers_name_is_a_miss(cache: TraceCache) -> None:
    cache.store(KEY, trace())
    path_of(cache).rename(path_of(cache, OTHER))
    assert cache.load(OTHER) is None


@pytest.mark.parametrize("key", [None, "", "../" + "a" * 61, "A" * 64, "a" * 63])
def test_what_is_no_key_names_no_file(cache: TraceCache, key: str | None) -> None:
    cache.store(key, trace())
    assert cache.load(key) is None
    assert cache.size() == CacheSize(0, 0)
    assert cache.folder is not None
    assert not list(cache.folder.parent.rglob("*.npz"))


def test_clear_removes_traces_and_nothing_else(cache: TraceCache) -> None:
    assert cache.clear() == CacheSize(0, 0)
    cache.store(KEY, trace())
    cache.store(OTHER, trace("mebi"))
    assert cache.folder is not None
    for name in ("notes.npz", "notes.txt", "c" * 64):
        (cache.folder / name).write_text("mine")
    found = cache.size()
    assert found.files == 2
    assert found.bytes == sum(path_of(cache, k).stat().st_size for k in (KEY, OTHER))
    assert cache.clear() == found
    assert cache.load(KEY) is None
    assert cache.size() == CacheSize(0, 0)
    assert len(list(cache.folder.iterdir())) == 3


def _at(path: Path, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_the_least_recently_used_leave_when_it_is_full(tmp_path: Path) -> None:
    keys = [letter * 64 for letter in "0123"]
    cache = TraceCache(tmp_path)
    for age, key in enumerate(keys[:3]):
        cache.store(key, trace())
        _at(path_of(cache, key), 300 - age)
    assert cache.load(keys[0]) is not None  # the oldest is used again
    one = cache.size().bytes // 3
    TraceCache(tmp_path, limit_bytes=3 * one + one // 2).store(keys[3], trace())
    assert [cache.load(key) is not None for key in keys] == [True, False, True, True]


def test_what_a_dead_writer_left_goes_and_a_living_ones_stays(
    cache: TraceCache,
) -> None:
    cache.store(KEY, trace())
    assert cache.folder is not None
    dead, living = (cache.folder / f"{OTHER}.npz.{name}.new" for name in ("x1", "x2"))
    for path in (dead, living):
        path.write_bytes(b"half")
    _at(dead, 7200)
    cache.store(KEY, trace())
    assert (dead.exists(), living.exists()) == (False, True)


def test_a_full_disk_leaves_no_half_files(
    cache: TraceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_cache, "write_trace", full)
    cache.store(KEY, trace())
    assert cache.folder is not None
    assert list(cache.folder.iterdir()) == []
    assert "kept in" in cache.trouble
    assert "(No space left on device)" in cache.trouble
    assert "BUDGETFIT_CACHE" in cache.trouble


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TraceCache(tmp_path / "file" / "below")
    cache.store(KEY, trace())
    assert cache.load(KEY) is None
    assert cache.clear() == CacheSize(0, 0)
    assert "(Not a directory)" in cache.trouble


def test_nothing_is_told_where_all_is_well(cache: TraceCache) -> None:
    assert cache.load(KEY) is None
    cache.store(KEY, trace())
    path_of(cache, OTHER).write_bytes(b"damaged")
    assert cache.load(OTHER) is None
    assert cache.trouble == ""


def test_a_folder_that_cannot_be_written_is_read(
    cache: TraceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, trace())

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "whole_file", refused)
    monkeypatch.setattr(files.os, "utime", refused)
    cache.store(OTHER, trace())
    assert cache.load(OTHER) is None
    assert cache.load(KEY) is not None
    assert "kept in" in cache.trouble
    assert "(Permission denied)" in cache.trouble


def test_writers_at_once_leave_a_whole_file(cache: TraceCache) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from budgetfit.traces.cache.cache import TraceCache\n"
        "cache = TraceCache(Path(sys.argv[1]))\n"
        f"trace = cache.load({OTHER!r})\n"
        "for _ in range(20):\n"
        f"    cache.store({KEY!r}, trace)\n"
        f"    assert cache.load({KEY!r}) is not None\n"
    )
    cache.store(OTHER, trace("mebi"))
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(cache.folder)])
        for _ in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert cache.size().files == 2
    assert cache.folder is not None
    assert len(list(cache.folder.iterdir())) == 2


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "relative/folder"])
def test_the_variable_switches_it_off(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", word)
    cache = TraceCache()
    assert cache.folder is None
    cache.store(KEY, trace())
    assert cache.load(KEY) is None
    assert cache.clear() == cache.size() == CacheSize(0, 0)


def test_switched_off_a_model_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "workload_key", lambda _: pytest.fail("hashed"))
    assert cache_folder() is None
    assert of_ranks(Mebi(3), 2).events.size


def test_the_variable_moves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", str(tmp_path / "mine"))
    TraceCache().store(KEY, trace())
    assert (tmp_path / "mine" / f"{KEY}.npz").exists()


def test_without_the_variable_it_is_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BUDGETFIT_CACHE")
    monkeypatch.setattr(files, "user_cache_path", lambda name, **_: tmp_path / name)
    assert cache_folder() == tmp_path / "budgetfit" / "traces"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUDGETFIT_CACHE")
    monkeypatch.setattr(files, "user_cache_path", lambda *_, **__: Path("~/.cache"))
    assert cache_folder() is None


def of_ranks(model: nn.Module, gpus: int, engine: Engine = "ddp") -> StepTrace:
    workload = Workload(model=model, batch=MIB_BATCH, gpu=find_gpu("t4"))
    ranks = Parallelism(engine=engine, gpus=gpus)
    recipe = Recipe(batch_size=2, optimizer="sgd", parallelism=ranks)
    return TraceSession(workload.with_found_blocks()).exact(recipe)


class Gathering(Mebi):
    """Looks at the samples of all ranks, as contrastive losses do."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        everyone = [torch.empty_like(out) for _ in range(ranks)]
        if ranks > 1:
            distributed.all_gather(everyone, out.detach())
        return out + torch.stack(everyone).mean() * 0


@pytest.mark.parametrize(
    ("model", "engine", "traced"),
    [(Mebi, "ddp", 1), (Gathering, "ddp", 2), (Mebi, "fsdp2", 2)],
)
def test_ddp_traces_hold_for_any_number_of_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: type[Mebi],
    engine: Engine,
    traced: int,
) -> None:
    """But for models that make tensors of all ranks, and for shards."""
    plain = of_ranks(model(3), 5, engine)
    monkeypatch.setenv("BUDGETFIT_CACHE", str(tmp_path))
    of_ranks(model(3), 2, engine)
    assert_equal(of_ranks(model(3), 5, engine), plain)
    assert len(list(tmp_path.rglob("*.npz"))) == traced
