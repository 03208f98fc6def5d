"""Settings of a captured command, passed to its processes in an environment variable."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "ASSAY_CAPTURE_SETTINGS"


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """The options of a captured command."""

    output: str
    """Absolute path of the folder of the trace."""
    notes: str
    """Folder for messages of the processes, a file each."""
    min_parameters: int
    """Modules with fewer parameters are not captured."""
    options: dict[str, Any]
    """Keyword arguments of `assay.capture`."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable that `of_environment` reads."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> "CaptureSettings":
        """Return the settings of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))
