"""The modules that the fork server of a check imports for both sides."""

from assay.runs.forking import import_to_stay

import_to_stay(
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by most decoders
    "assay.generate.processes.candidate",
    "assay.generate.processes.operation_trace",
    "assay.generate.processes.equivalence",
    "assay.generate.processes.golden",
)
