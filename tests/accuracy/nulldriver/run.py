"""Run a command with the null driver in place of a GPU.

    python -m tests.accuracy.nulldriver.run --gpu rtx-4090 -- python train.py

GPU is a card of budgetfit's table, or one of its other names. The command gets the
environment's own ``python`` first in its path.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.accuracy.nulldriver.build import PRELOADED
from tests.accuracy.nulldriver.cards import ROOT, ImitatedCard, all_cards, find_card

ENVIRONMENTS: Final = ROOT / ".nulldriver"  # one per version of torch; ignored by git
DEFAULT: Final = "NULLDRIVER_ENVIRONMENT"  # names another one


def environment_folder(torch: str) -> Path:
    """Where the environment with a version of torch belongs."""
    return ENVIRONMENTS / f"torch-{torch}"


def pinned_version(package: str, constraints: Path = ROOT / "constraints.txt") -> str:
    """The version of a package that the project's tests run on."""
    for line in constraints.read_text("utf-8").splitlines():
        name, _, version = line.partition("==")
        if name == package:
            return version
    msg = f"{constraints} names no version of {package}"
    raise ValueError(msg)


def default_environment() -> Path:
    """The environment that is used when none is named."""
    named = os.environ.get(DEFAULT)
    return Path(named) if named else environment_folder(pinned_version("torch"))


def variables(
    card: ImitatedCard,
    environment: Path,
    libraries: Path,
    before: Mapping[str, str],
    memory_gib: float | None = None,
) -> dict[str, str]:
    """The environment variables of a command that sees an imitated card.

    Args:
        card: The card to imitate.
        environment: Virtual environment with the CUDA build of torch.
        libraries: Where the null driver was built.
        before: The variables so far; a memory size among them stays.
        memory_gib: Memory of the card in place of its own.
    """
    after = {**before, **card.settings}
    if memory_gib is not None:
        after["NULLCUDA_GB"] = str(memory_gib)
    folders = (str(libraries), before.get("LD_LIBRARY_PATH"))
    after["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    # Alone: another card's null driver may be there, when one is started by the other.
    after["LD_PRELOAD"] = str(libraries / PRELOADED.file)
    folders = (str(environment / "bin"), before.get("PATH"))
    after["PATH"] = os.pathsep.join(filter(None, folders))
    after["VIRTUAL_ENV"] = str(environment)
    return after


def main() -> None:
    """Become the command on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", help="the card to imitate")
    parser.add_argument("--memory-gib", type=float, help="in place of the card's own")
    parser.add_argument("--environment", type=Path, help="default: .nulldriver/torch-*")
    parser.add_argument("--libraries", type=Path, help="default: within it")
    parser.add_argument("--list", action="store_true", help="only print the cards")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.list:
        print("\n".join(card.name for card in all_cards()))
        return
    command = options.command[options.command[:1] == ["--"] :]
    if not command or not options.gpu:
        parser.error("--gpu NAME and a command are needed")
    try:
        card = find_card(options.gpu)
    except ValueError as error:
        parser.error(str(error))
    environment = (options.environment or default_environment()).resolve()
    libraries = (options.libraries or environment / "nulldriver").resolve()
    if not (libraries / PRELOADED.file).is_file():
        parser.error(f"{libraries} holds no null driver; install or build it first")
    after = variables(card, environment, libraries, os.environ, options.memory_gib)
    os.execvpe(command[0], command, after)  # the caller's own command


if __name__ == "__main__":
    main()
