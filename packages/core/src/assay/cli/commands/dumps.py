"""`assay compare` and `assay inspect`: the commands on dumps."""

import json
from typing import Annotated

from assay.api import dumps
from assay.api.options import Option
from assay.cli.derived_commands import derive_command, with_options

compare = derive_command(
    dumps.compare,
    """Compare two dumps on disk: are they the same, and if not, where do they differ first?

    Each is a folder or file of any supported tool, or a model folder, which may be quantized. No model runs
    unless --model is given.

    Example: assay compare dump/golden dump/mine

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """,
)


@with_options
def inspect(
    folder: Annotated[str, Option("A dump, trace or golden; a folder or URL.", "FOLDER")],
    *,
    as_format: Annotated[str | None, Option("Default: recognized.", "NAME")] = None,
    as_json: Annotated[bool, Option("Print JSON.")] = False,
) -> None:
    """List what a dump holds: format, ranks, passes, modules, sizes, and what is missing or damaged.

    Example: assay inspect dump/golden

    Exit code: 0, or 2 if the dump cannot be read.
    """
    from assay.plugins import import_torch_alone

    import_torch_alone()
    from assay.offline.contents import describe_contents
    from assay.output.streams import print_text
    from assay.runs import open_progress

    with open_progress() as progress, progress.step(f"inspects {folder}"):
        contents = describe_contents(folder, as_format)
    if as_json:
        print_text(json.dumps(contents.to_json(), indent=1))
    else:
        for line in contents.to_lines():
            print_text(line)
