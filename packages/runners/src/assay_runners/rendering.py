"""The rendered files below `runners/`: their texts, from the entries and the templates, and those out of date."""

import json
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import jinja2

from assay_runners.fleet import Fleet, GitHub, Runner, Vendor
from assay_runners.planning import list_labels
from assay_runners.running import SICK

FOLDER = PurePosixPath("runners")
# https://github.com/actions/actions-runner-controller, charts/gha-runner-scale-set/Chart.yaml
_CHART_VERSION = "0.14.2"
# Added to the time limit of a job: a pod's time starts before its image (10 GB and more) is pulled, and
# ends after the second health check.
_EXTRA_MINUTES = 30
# Listing cards takes seconds; some drivers need half a minute after the machine has started.
_HEALTH_SECONDS = 60
# The user of GitHub's own runner image: images/Dockerfile of github.com/actions/runner.
_USER_ID = 1001
# An environment with torch, from which each job takes what it would install.
_PACKAGES = "/var/cache/assay/packages"

_SHARED_FILES = (
    "health.sh",
    "bare-metal/assay-runner.plist",
    "bare-metal/assay-runner@.service",
    "bare-metal/bootstrap.sh",
    "bare-metal/register.sh",
)
_UNVERIFIED = {
    "resources": "the names of the resources",
    "scheduler": "the name of the scheduler",
    "shown": "how the operating system shows the cards",
    "torch": "the module that registers the cards with torch",
    "image": "the base image of the container, and that its Python has the torch",
    "health": "the program that lists the cards, and its output for each card",
    "variables": "the environment variables",
    "model_cache": "the folder of the models",
}

# The head of every rendered file. A file without it is never deleted.
HEADER = "Rendered by `assay runners render`: edit runners/*.toml or its template, not this file."
# A script starts with its interpreter, XML with its version.
_LINES_WITH_HEADER = 3


def render_fleet(fleet: Fleet) -> dict[PurePosixPath, str]:
    """Render every file. Returns: the texts, by path below the repository's root."""
    overview = _fill(
        "overview.md", packages=_PACKAGES, chart_version=_CHART_VERSION, **_values(fleet)
    )
    files = {FOLDER / "README.md": overview}
    for name in _SHARED_FILES:
        files[FOLDER / name] = _fill(
            name, sick=SICK, health_seconds=_HEALTH_SECONDS, github=fleet.github
        )
    for vendor in fleet.vendors:
        for name, text in _render_vendor(vendor, fleet.github):
            files[FOLDER / vendor.name / name] = text
    return files


def describe_settings(fleet: Fleet) -> str:
    """Write the settings to make on GitHub, after the limits of the plan."""
    return _fill("settings.md", **_values(fleet))


def _values(fleet: Fleet) -> dict[str, object]:
    return {
        "github": fleet.github,
        "vendors": fleet.vendors,
        "runners": list(fleet.runners()),
        "labels": list_labels(fleet),
    }


def _render_vendor(vendor: Vendor, github: GitHub) -> Iterator[tuple[str, str]]:
    runners = [Runner(vendor=vendor, kind=kind) for kind in vendor.runners]
    values = {
        "vendor": vendor,
        "github": github,
        "runners": runners,
        "chart_version": _CHART_VERSION,
        "user_id": _USER_ID,
        "mounts": {"models": vendor.model_cache, "packages": _PACKAGES},
        "sick": SICK,
        "extra_minutes": _EXTRA_MINUTES,
        "unverified": [(field, _UNVERIFIED.get(field, field)) for field in vendor.unverified],
    }
    yield "README.md", _fill("README.md", **values)
    if vendor.health:
        yield "health.json", _fill("health.json", **values)
    if vendor.image:
        yield "Containerfile", _fill("Containerfile", **values)
    for runner in runners:
        yield f"runner{runner.suffix}.env", _fill("runner.env", runner=runner, **values)
        if vendor.image:
            yield f"values{runner.suffix}.yaml", _fill("values.yaml", runner=runner, **values)
            yield f"pod{runner.suffix}.yaml", _fill("pod.yaml", runner=runner, **values)


def _fill(name: str, **values: object) -> str:
    """Render `templates/NAME.jinja`. A missing value is an error."""
    return _TEMPLATES.get_template(f"{name}.jinja").render(values)


def _quote_for_containerfile(text: str) -> str:
    """Quote a value of ENV or ARG, without variable expansion."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # noqa: S701 - no HTML: a filter quotes for each language
)
_TEMPLATES.filters |= {
    "containerfile": _quote_for_containerfile,
    "json": json.dumps,  # every JSON string is also a YAML string
    "shell": shlex.quote,
}


def write_rendered(root: Path, fleet: Fleet) -> list[PurePosixPath]:
    """Write the rendered files below `root`, and delete those of removed entries.

    Returns: the changed, created and deleted files, relative to `root`.
    """
    rendered = render_fleet(fleet)
    outdated = sorted(find_outdated(root, fleet))
    for path in outdated:
        file = root / path
        if path in rendered:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(rendered[path], encoding="utf-8", newline="\n")
            file.chmod(0o755 if file.suffix == ".sh" else 0o644)
        else:
            file.unlink()
            if not any(file.parent.iterdir()):
                file.parent.rmdir()
    return outdated


def find_outdated(root: Path, fleet: Fleet) -> dict[PurePosixPath, str]:
    """Find the rendered files below `root` that are out of date. Returns: each problem, by path."""
    rendered = render_fleet(fleet)
    differing = {
        path: difference
        for path, text in rendered.items()
        if (difference := _find_difference(root / path, text))
    }
    stale = {path: "no entry renders it" for path in _find_rendered(root) if path not in rendered}
    return differing | stale


def _find_difference(file: Path, text: str) -> str:
    """Say how `file` differs from the rendered `text`; "" if it does not."""
    if not file.is_file():
        return "it is missing"
    if file.read_bytes() != text.encode():
        return "it differs from its entry"
    if file.suffix == ".sh" and not file.stat().st_mode & stat.S_IXUSR:
        return "it is not executable"
    return ""


def _find_rendered(root: Path) -> Iterator[PurePosixPath]:
    """Yield the files below `runners/` with the header."""
    for file in sorted((root / FOLDER).rglob("*")):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as content:
                head = b"".join(content.readline() for _ in range(_LINES_WITH_HEADER))
            if HEADER.encode() in head:
                yield PurePosixPath(file.relative_to(root).as_posix())
