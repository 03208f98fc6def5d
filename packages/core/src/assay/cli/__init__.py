"""The command line: `assay`. Importing it imports no torch."""

import sys
from typing import NoReturn

from assay.cli.ending import exit_on_error


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    with exit_on_error():
        # Imported here, so that Ctrl-C during the import prints one message.
        from assay.cli.application import app, build_command

        build_command(app)(prog_name="assay")  # for shell completion also as python -m assay.cli
    sys.exit(0)
