"""Entry point of ``python -m budgetfit``."""

from budgetfit.cli.app import main

if __name__ == "__main__":
    main()
