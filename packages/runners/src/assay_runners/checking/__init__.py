"""Rules for the committed workflows that no general linter has."""

from assay_runners.checking.checks import RULES, check_workflows
from assay_runners.checking.context import Finding

__all__ = ["RULES", "Finding", "check_workflows"]
