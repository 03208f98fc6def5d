"""Any training library, run by its own command line as a TOML file says.

Importing this package imports no torch.
"""

from assay_smoke.external.cycle import run_external
from assay_smoke.external.library import ExternalLibrary, read_library

__all__ = ["ExternalLibrary", "read_library", "run_external"]
