"""Python imports this at the start of every process of a captured command, with assay or without."""
# ruff: noqa: INP001 - the folder is on the path of those processes

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

# The environment may have a module of the same name.
sys.path.remove(str(Path(__file__).parent))
own = sys.modules.pop(__name__)
with suppress(ImportError):
    import_module(__name__)
sys.modules.setdefault(__name__, own)

try:
    attaching = import_module("assay.recording.attached_process")
except ImportError as error:
    notes = Path(json.loads(os.environ["ASSAY_CAPTURE_SETTINGS"])["notes"])
    text = f"{sys.executable} has no assay, and was not captured ({error})"
    (notes / str(os.getpid())).write_text(json.dumps(["problem", text]), encoding="utf-8")
else:
    attaching.attach()
