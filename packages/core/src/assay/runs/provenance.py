"""Provenance of a run: versions, machine, command, settings. Imports no torch."""

import fnmatch
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("assay-core", "torch", "transformers", "safetensors", "numpy")
# Listed where they are installed.
_OPTIONAL = (
    "accelerate", "assay-bench", "assay-expectations", "assay-smoke", "deepspeed", "lm-eval", "peft", "trl",
)  # fmt: skip

# Variables that change numbers or the visible devices. No others, which may be secrets.
_VARIABLES = (
    "ASSAY_*", "OMP_*", "MKL_*", "KMP_*", "ATEN_*", "TORCH_*", "PYTORCH_*", "*_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONHASHSEED",
)  # fmt: skip

_GIT_TIMEOUT_SECONDS = 5


def provenance() -> dict[str, Any]:
    """The provenance of this process as JSON values; None for what is unknown."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": _num_usable_cpus(),
        "num_threads": _num_threads(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS}
        | {name: version for name in _OPTIONAL if (version := _version(name))},
        "git": _git_state(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in _VARIABLES)
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu"):
            return value.strip()
    return platform.processor() or platform.machine() or None


def _num_usable_cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _num_threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _git_state() -> dict[str, Any] | None:
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 - the user's git
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
