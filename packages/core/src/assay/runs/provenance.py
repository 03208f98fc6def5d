"""Provenance of a run: versions, machine, command, settings. Imports no torch."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from assay.files import read_toml

_DISTRIBUTIONS = ("assay-core", "torch", "transformers", "safetensors", "numpy")
# Listed where they are installed.
_OPTIONAL = (
    "accelerate", "assay-bench", "assay-expectations", "assay-smoke", "deepspeed", "lm-eval", "peft", "trl",
)  # fmt: skip

_VARIABLES = Path(__file__).with_name("recorded_variables.toml")

# Names that mark a secret, as in `api_key=...` and `--hub-token ...`, and patterns of secret
# values. Sources: the prefixes that GitHub, Hugging Face, OpenAI, Slack, AWS and Google document.
_SECRET_NAME = re.compile(
    r"(?i)(^|[^a-z])(api[-_]?key|access[-_]?key|private[-_]?key|auth(?:orization)?|bearer"
    r"|credentials?|passw(?:or)?d|passphrase|secret|token)([^a-z]|$)"
)
_SECRET_VALUE = re.compile(
    r"(gh[opsur]_\w{16,}|github_pat_\w{16,}|hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[A-Z0-9]{12,}|AIza[\w-]{20,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_HIDDEN = "***"

_GIT_TIMEOUT_SECONDS = 5


def provenance() -> dict[str, Any]:
    """Return the provenance of this process as JSON values; None for unknown ones."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": _num_usable_cpus(),
        "num_threads": _num_threads(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS}
        | {name: version for name in _OPTIONAL if (version := _version(name))},
        "git": _git_state(),
        "variables": {
            name: redact([os.environ[name]])[0]
            for names in read_toml(_VARIABLES).values()
            for name in names
            if name in os.environ
        },
    }


def changed_packages(
    then: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[str | None, str | None]]:
    """Return the versions that differ between two environments, as `provenance` describes them."""
    old, new = then.get("versions", {}), now.get("versions", {})
    names = sorted(name for name in old.keys() | new.keys() if not name.startswith("assay"))
    found = {
        name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)
    }
    if then.get("cpu") != now.get("cpu"):
        found["cpu"] = then.get("cpu"), now.get("cpu")
    return found


def describe_packages(changed: Mapping[str, tuple[str | None, str | None]]) -> str:
    """List the changed versions: "torch 2.11.0 -> 2.13.0"."""
    return ", ".join(
        f"{name} {old or 'absent'} -> {new or 'absent'}" for name, (old, new) in changed.items()
    )


def describe_python(python: Path | None) -> dict[str, Any]:
    """Describe the environment of this process, if it is the one of `--candidate-python`."""
    if python is None:
        return {}
    facts = provenance()
    return {"python": str(python), "python_version": facts["python"], "packages": facts["versions"]}


def redact(words: Sequence[str]) -> list[str]:
    """Hide secrets in the words of a command, found by name or by pattern.

    >>> redact(["--model-args", "model=m,api_key=x", "--token", "y"])
    ['--model-args', 'model=m,api_key=***', '--token', '***']
    """
    shown: list[str] = []
    for word in words:
        is_value = bool(shown) and shown[-1].startswith("--") and "=" not in shown[-1]
        if is_value and _SECRET_NAME.search(shown[-1]):
            shown.append(_HIDDEN)
        else:
            shown.append(_SECRET_VALUE.sub(_HIDDEN, _ASSIGNMENT.sub(_hide_value, word)))
    return shown


# NAME=VALUE up to the next comma or space; a value may hold `=`.
_ASSIGNMENT = re.compile(r"([\w.-]+)([=:])([^,\s]+)")


def _hide_value(found: re.Match[str]) -> str:
    name, separator, _ = found.groups()
    return f"{name}{separator}{_HIDDEN}" if _SECRET_NAME.search(name) else found[0]


@cache
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
    commit = run_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = run_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def run_git(*arguments: str) -> str | None:
    """Return the output of a git command in the working directory; None if it fails."""
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
