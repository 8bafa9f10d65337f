"""Host memory of this process."""

import mmap
from pathlib import Path

import pytest

from budgetfit.measuring import process_memory
from budgetfit.measuring.process_memory import resident_bytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux only")
def test_memory_that_is_written_to_is_seen() -> None:
    before = resident_bytes()
    # A mapping of its own: bytes may take memory that the process holds already.
    held = mmap.mmap(-1, 64 * 2**20)
    held.write(b"x" * (64 * 2**20))
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before >= 48 * 2**20
    held.close()


def test_where_nobody_tells_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_memory, "_STATM", tmp_path / "none")
    assert resident_bytes() is None
