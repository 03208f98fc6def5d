"""What the fork server imports leaves it fit to be forked."""

import os
import subprocess
import sys

# The child of a process that has run threads of OpenMP waits for them for ever.
CODE = """
import os, signal
import importlib
from assay.generate.processes.remote_functions import PRELOAD
for module in PRELOAD:
    importlib.import_module(module)
import torch
child = os.fork()
if child == 0:
    signal.alarm(30)
    torch.set_num_threads(2)
    torch.ones(2_000_000).cos().sum()
    torch.ones(500, 500) @ torch.ones(500, 500)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_process_forked_after_the_imports_can_compute_on_two_threads() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        timeout=110,
    )

    assert (result.returncode, result.stderr) == (0, "")
