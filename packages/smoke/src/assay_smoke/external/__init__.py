"""Any training library, run by its own command line as a TOML file says.

Importing this package imports no torch.
"""

from assay_smoke.external.cycle import run_external
from assay_smoke.external.subject import Subject, read_subject

__all__ = ["Subject", "read_subject", "run_external"]
