"""Entry point of `python -m serve [options]`, which is also installed as `penstock`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from serve import WrongPackageError, check_packages


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        check_packages()
    except WrongPackageError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    from serve.cli.main import run  # imports the packages checked above

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
