"""Imported by the fork server of the worlds of all cases: what they need, and nothing that runs."""

from assay.runs.forking import import_to_stay

import_to_stay(
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # what decoders have in common
    "assay_smoke.cases.worlds",
    "assay_smoke.cases.reading",
)
