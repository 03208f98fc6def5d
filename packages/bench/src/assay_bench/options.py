"""Options that several commands of `assay bench` share."""

from pathlib import Path
from typing import Annotated

from assay.api.options import Option

Run = Annotated[str, Option("Device and dtype: cpu/bfloat16.", "RUN")]
Output = Annotated[Path | None, Option("Default: runs/<time>-bench-<command>.", "DIR")]
AsJson = Annotated[bool, Option("Print the result as JSON and nothing else.")]
