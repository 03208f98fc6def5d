"""The process that `assay.devices.detection.isolation` runs: prints one line of JSON per answer."""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from assay.devices import registry
from assay.devices.run_string import Run
from assay.errors import AssayError, UsageError


def main(arguments: list[str]) -> None:
    """Answer `detect KIND...` or `open DEVICE DTYPE` on standard output."""
    question, *names = arguments
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # Vendors' libraries print to standard output; it is redirected, so that only answers go there.
        os.dup2(2, 1)
        if question == "detect":
            for kind in names:
                print(json.dumps(_detect(kind)), file=answers, flush=True)
        else:
            print(json.dumps(_open(Run(*names))), file=answers, flush=True)


def _detect(kind: str) -> dict[str, Any]:
    try:
        return {"detections": [asdict(detection) for detection in registry.detect(kind)]}
    except AssayError as error:
        return _failure(error)


def _open(run: Run) -> dict[str, Any]:
    try:
        registry.open_run(run)
    except AssayError as error:
        return _failure(error)
    return {}


def _failure(error: AssayError) -> dict[str, Any]:
    kind = "usage" if isinstance(error, UsageError) else "machine"
    return {"error": kind, "message": str(error)}


if __name__ == "__main__":
    main(sys.argv[1:])
    # Ends without exit handlers: a vendor's library that crashes there must not void the answer.
    os._exit(0)
