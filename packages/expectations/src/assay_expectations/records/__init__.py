"""Records of an expectation file. Imports no torch."""

from assay_expectations.records.expectation import Expectation, Provenance
from assay_expectations.records.files import (
    file_for,
    read_expectation,
    require_writable,
    write_expectation,
)
from assay_expectations.records.keys import (
    Content,
    Key,
    Machine,
    Settings,
    Weight,
    content_differences,
    machine_differences,
    value_differences,
    weight_differences,
)
from assay_expectations.records.values import (
    Distributions,
    LogProbabilities,
    Observed,
    Projections,
    Signature,
)

__all__ = [
    "Content",
    "Distributions",
    "Expectation",
    "Key",
    "LogProbabilities",
    "Machine",
    "Observed",
    "Projections",
    "Provenance",
    "Settings",
    "Signature",
    "Weight",
    "content_differences",
    "file_for",
    "machine_differences",
    "read_expectation",
    "require_writable",
    "value_differences",
    "weight_differences",
    "write_expectation",
]
