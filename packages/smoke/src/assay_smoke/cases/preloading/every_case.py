"""Imported by the fork server of all cases."""

from assay.runs.forking import import_to_stay

import_to_stay(
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by all decoders
    "assay_smoke.cases.worlds",
    "assay_smoke.cases.reading",
)
