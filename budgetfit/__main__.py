"""Entry point of ``budgetfit`` and ``python -m budgetfit``."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends with 130 while its modules load, too."""
    try:
        from budgetfit.cli.app import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
