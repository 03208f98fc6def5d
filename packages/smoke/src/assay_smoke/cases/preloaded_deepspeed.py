"""Imported by the fork server: DeepSpeed, and the compiler that its engine imports for an optimizer."""

import os
from unittest import mock

from assay_smoke.matrix.vendors import HOST

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": HOST}):
    import assay_smoke.trainers.deepspeed.trainer  # noqa: F401 - see above
