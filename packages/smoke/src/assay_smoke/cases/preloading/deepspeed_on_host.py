"""Imported by the fork server: DeepSpeed, and the compiler that its engine imports for an optimizer."""

import os
from unittest import mock

from assay.runs.forking import import_to_stay
from assay_smoke.matrix.rules import HOST

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": HOST}):
    import_to_stay(
        "assay_smoke.trainers.deepspeed.trainer",
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    )
