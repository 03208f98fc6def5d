"""The command line: `assay`. Importing it imports no torch."""

import sys
from typing import NoReturn

from assay.cli.ending import exceptions_ended


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    with exceptions_ended():
        # Here, so that Ctrl-C during these imports is one message, too.
        from assay.cli import application, extensions

        extensions.add_extensions(application.app, extensions.find_extensions())
        application.app(prog_name="assay")  # for shell completion also as python -m assay.cli
    sys.exit(0)
