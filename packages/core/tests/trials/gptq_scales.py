"""Measure which wrong scales of GPTQ are found: the numbers of docs/compare.md.

    python -m packages.core.tests.trials.gptq_scales    # 2 minutes of one core

Quantizes random weights of 1,024 columns, and makes 24 scales 10 % too large or too small.
"""

import sys
from dataclasses import replace

from packages.core.tests.trials.tables import markdown_table
from packages.core.tests.unit.models.quantization.test_measuring import (
    Sample,
    quantize_by_gptq,
)

COLUMNS = 1024
NUM_WRONG = 24
FACTORS = (1.1, 0.9)
# Bits, group size, rows.
CASES = ((4, 128, 2048), (4, 64, 2048), (4, 32, 2048), (4, 128, 512), (3, 128, 2048))


def count_found(sample: Sample, size: int, rows: int) -> int:
    """Return the number of wrong scales that a finding names."""
    across = COLUMNS // size
    scales, places = sample.weight.scales.clone(), set()
    for number in range(NUM_WRONG):
        row, group = number * (rows // NUM_WRONG), number * 5 % across
        scales[row * across + group] *= FACTORS[number % 2]
        places.add((row, group * size))
    findings = Sample(sample.original, replace(sample.weight, scales=scales)).findings()
    named = {(one.place.rows.start, one.place.columns[0]) for one in findings if one.place}
    return len(places & named)


def measure(bits: int, size: int, rows: int) -> tuple[str, ...]:
    """Return a column of the table: the case, wrong scales found, and false findings."""
    sample = quantize_by_gptq(size, bits, rows, COLUMNS)
    clean = sample.judge()
    return (
        f"{bits}, {size}, {rows:,}",
        str(count_found(sample, size, rows)),
        f"{len(clean.findings)} of {sample.weight.groups.num_groups:,}",
        f"{clean.resolution:.0%}",
    )


def main() -> None:
    """Print the table."""
    names = (
        "GPTQ: bits, group size, rows",
        f"scales 10% off that were found, of {NUM_WRONG}",
        "false findings",
        "resolution that the verdict states",
    )
    columns = [measure(*case) for case in CASES]
    head, *rows = zip(names, *columns, strict=True)
    sys.stdout.write(f"{markdown_table(head, rows)}\n")


if __name__ == "__main__":
    main()
