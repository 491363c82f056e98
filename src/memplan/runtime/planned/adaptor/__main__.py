"""Build the adaptor for the installed PyTorch."""

from __future__ import annotations

import sys

from memplan.runtime.planned.adaptor.build import build
from memplan.types.errors import MemplanError


def main() -> int:
    try:
        print(build())
    except MemplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
