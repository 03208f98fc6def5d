"""Rules over the committed workflows that no general linter knows."""

from assay_runners.checking.checks import RULES, check_workflows
from assay_runners.checking.findings import Finding

__all__ = ["RULES", "Finding", "check_workflows"]
