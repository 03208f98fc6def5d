"""Results with given times."""

from collections.abc import Sequence

from assay_bench.performance.records import PerformanceResult, SuiteResult


def suite_result(
    seconds: Sequence[float] = (2.0, 3.0), suite: str = "prefill", **fields: object
) -> SuiteResult:
    """Controls: 1 s for 100 operations, 0.5 s for 10 bytes."""
    count = len(seconds)
    known = {
        "matmul_seconds": [1.0] * count,
        "matmul_flops": 100,
        "read_seconds": [0.5] * count,
        "read_bytes": 10,
    }
    return SuiteResult.model_validate({"suite": suite, "seconds": list(seconds), **known, **fields})


def performance_result(
    seconds: float = 2.0, date: str = "2026-01-01T00:00:00+00:00", suite: str = "prefill"
) -> PerformanceResult:
    return PerformanceResult(
        machine="a processor (2 processors)",
        run="cpu/float32",
        model="micro:llama",
        suites=[suite_result([seconds], suite)],
        versions={"torch": "2.13.0"},
        provenance={"date": date, "git": {"commit": "0123456789abcdef", "changed": False}},
    )
