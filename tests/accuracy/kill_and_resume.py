"""Kill a training with SIGKILL at random steps and compare every loss that follows.

    python -m tests.accuracy.kill_and_resume               # 20 kills
    python -m tests.accuracy.kill_and_resume --kills 2

The training is examples/resume.py, and so is the uninterrupted run. Losses are compared
as text that holds every bit.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "resume.py"
LINE = re.compile(r"step (\d+) loss (\S+)")


@dataclass
class Outcome:
    """What came out of a training that was killed again and again.

    Attributes:
        kills: Processes that were killed.
        compared: Losses that were compared.
        repeated: Of those, losses of steps that ran more than once.
        different: Steps whose loss was not the uninterrupted run's.
    """

    kills: int = 0
    compared: int = 0
    repeated: int = 0
    different: list[int] = field(default_factory=list)


def kill_and_resume(kills: int, steps: int, folder: Path, seed: int) -> Outcome:
    """Train once through and once with ``kills`` kills; compare all losses."""
    chance = random.Random(seed)
    outcome, seen = Outcome(), set[int]()
    expected = dict(_losses(folder / "through", steps, outcome))
    killed = folder / "killed"
    killed.mkdir()
    shutil.copy(folder / "through" / "plan.json", killed)
    for last in [False] * kills + [True]:
        # So few that even the last kill comes before the last step.
        after = None if last else chance.randint(1, max(1, steps // kills - 1))
        for step, loss in _losses(
            killed, steps, outcome, after, chance.uniform(0, 0.1)
        ):
            outcome.compared += 1
            outcome.repeated += step in seen
            seen.add(step)
            if loss != expected[step]:
                outcome.different.append(step)
    if seen != set(expected):
        raise RuntimeError(f"Steps are missing: {sorted(set(expected) - seen)}.")
    return outcome


def _losses(
    folder: Path,
    steps: int,
    outcome: Outcome,
    kill_after: int | None = None,
    delay_s: float = 0.0,
) -> Iterator[tuple[int, str]]:
    """Run the script and yield its losses; kill it a moment after some of them."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    command += ["--folder", str(folder), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        count = 0
        for line in process.stdout or ():
            found = LINE.match(line)
            if found is None:
                continue
            yield int(found[1]), found[2]
            count += 1
            if count == kill_after:
                time.sleep(delay_s)  # into the middle of a step, or of a save
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
        error = process.stderr.read() if process.stderr else ""
    outcome.kills += process.returncode == -signal.SIGKILL
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"The training failed:\n{error[-2000:]}")


def main() -> None:
    """Print how many losses were compared and how many differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_and_resume(
            options.kills, options.steps, Path(folder), options.seed
        )
    print(
        f"{outcome.kills} kills in {options.steps} steps: {outcome.compared} losses "
        f"compared ({outcome.repeated} of steps that ran again), "
        f"{len(outcome.different)} differ from the uninterrupted run's"
    )
    sys.exit(bool(outcome.different))


if __name__ == "__main__":
    main()
