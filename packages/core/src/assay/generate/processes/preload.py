"""Imported by the fork server of a check: what both sides need, and nothing that runs."""

from assay.runs.forking import import_to_stay

import_to_stay(
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # what decoders have in common
    "assay.generate.processes.candidate",
    "assay.generate.processes.operation_trace",
    "assay.generate.processes.equivalence",
    "assay.generate.processes.golden",
)
