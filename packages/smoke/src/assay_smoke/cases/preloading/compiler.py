"""Imported by the fork server: what `torch.compile` looks for when it is first called."""

from assay.runs.forking import import_to_stay

import_to_stay("torch._inductor.compile_fx")
