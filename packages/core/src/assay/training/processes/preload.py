"""Imports of both sides, which the fork server of a check makes once."""

from assay.runs.forking import import_to_stay

import_to_stay(
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # what decoders have in common
    "assay.training.processes.candidate",
)
