"""An expectation as an in-toto statement, to be signed by whoever answers for it.

Sources: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md and
spec/predicates/test-result.md beside it.
"""

import hashlib
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay_expectations.records.files import read_expectation


def statement_of(file: Path) -> dict[str, Any]:
    """Return the statement that the captures of `file` agree. A hand-edited file is refused.

    Raises: UnreadableFileError; UsageError if it has only one capture.
    """
    expectation = read_expectation(file)
    if len(expectation.captures) < 2:
        raise UsageError(f"{file} was captured once: a statement is about captures that agree")
    key = expectation.key.model_dump_json().encode()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": file.name, "digest": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}}
        ],
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": "PASSED",
            "configuration": [
                {
                    "name": expectation.model,
                    "digest": {"sha256": hashlib.sha256(key).hexdigest()},
                    "annotations": {
                        "machine": expectation.key.machine.model_dump(mode="json"),
                        "provenance": expectation.provenance.model_dump(mode="json"),
                    },
                }
            ],
            "passedTests": [
                f"capture {number} agrees with capture 1"
                for number in range(2, len(expectation.captures) + 1)
            ],
        },
    }
