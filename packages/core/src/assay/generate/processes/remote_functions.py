"""The functions that the processes of a generation check call. Importing it imports no torch."""

from typing import TYPE_CHECKING

from assay.launch import RemoteFunction

if TYPE_CHECKING:
    from assay.generate.processes.equivalence import Equivalence
    from assay.generate.processes.requests import (
        CandidateReport,
        CandidateRequest,
        EquivalenceRequest,
        GoldenManifest,
        GoldenRequest,
        OperationsRequest,
    )

# A candidate that generates supports tensor parallelism only.
AXES = ("tp",)

# The fork server imports these once for all processes of a check.
PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by most decoders
    "assay.generate.processes.candidate",
    "assay.generate.processes.operation_trace",
    "assay.generate.processes.equivalence",
    "assay.generate.processes.golden",
)

EARLY: "RemoteFunction[CandidateRequest, None]" = RemoteFunction(
    "assay.generate.processes.candidate_model:check_candidate", PRELOAD
)
GOLDEN: "RemoteFunction[GoldenRequest, GoldenManifest]" = RemoteFunction(
    "assay.generate.processes.golden:capture_golden", PRELOAD
)
CANDIDATE: "RemoteFunction[CandidateRequest, CandidateReport]" = RemoteFunction(
    "assay.generate.processes.candidate:run_candidate", PRELOAD
)
OPERATIONS: "RemoteFunction[OperationsRequest, None]" = RemoteFunction(
    "assay.generate.processes.operation_trace:trace_operations", PRELOAD
)
RECORDED_EQUIVALENCE: "RemoteFunction[EquivalenceRequest, bool]" = RemoteFunction(
    "assay.generate.processes.equivalence:record_equivalence", PRELOAD
)
EQUIVALENCE: "RemoteFunction[EquivalenceRequest, Equivalence]" = RemoteFunction(
    "assay.generate.processes.equivalence:verify_equivalence", PRELOAD
)
