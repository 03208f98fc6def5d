"""Imported by the fork server: DeepSpeed, and the compiler that its engine imports for an optimizer."""

import os
from importlib import import_module
from unittest import mock

from assay_smoke.matrix.rules import HOST

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": HOST}):
    import_module("assay_smoke.trainers.deepspeed.trainer")
    import_module("deepspeed")
    import_module("deepspeed.runtime.zero.muon.muon_optimizer")
