"""``python -m penstock_lab.report RUN`` draws report.html from a run folder."""

import sys

from penstock.kernel.errors import PenstockError
from penstock_lab.report.run.run_page import write_report


def main(arguments: list[str]) -> int:
    """Draw each folder; 2 where one can't be drawn."""
    if not arguments:
        sys.stderr.write("usage: python -m penstock_lab.report RUN...\n")
        return 2
    for folder in arguments:
        try:
            path = write_report(folder)
        except PenstockError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
