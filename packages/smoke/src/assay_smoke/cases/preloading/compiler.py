"""Imported by the fork server: the modules that `torch.compile` imports on its first call."""

from assay.runs.forking import import_to_stay

import_to_stay("torch._inductor.compile_fx")
