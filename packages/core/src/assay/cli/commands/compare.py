"""`assay compare`: compare two dumps offline."""

from assay.api import dumps
from assay.cli.derived_commands import derive_command

compare = derive_command(
    dumps.compare,
    """Compare two dumps on disk: are they the same, and if not, where do they differ first?

    Each is a folder or file of any supported tool, or a model folder, which may be quantized. No model runs
    unless --model is given.

    Example: assay compare dump/golden dump/mine

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """,
)
