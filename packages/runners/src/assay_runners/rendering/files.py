"""Every file that is rendered, and from what: an entry, one of its runners, or nothing of either."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from assay_runners.fleet.entries import Fleet, GitHub, Runner, Vendor
from assay_runners.planning.labels import LABELLED_TIERS, TIER_SESSIONS
from assay_runners.rendering.templates import fill
from assay_runners.running.machine_job import SICK

FOLDER = PurePosixPath("runners")
# https://github.com/actions/actions-runner-controller, charts/gha-runner-scale-set/Chart.yaml
_CHART_VERSION = "0.14.2"
# Beside a job's own limit: a pod's time begins before its image of 10 GB and more is there, and ends
# after the second look at its health.
_MINUTES_BESIDE_JOB = 30
# A list of cards takes seconds; some drivers need half a minute after the machine has started.
_HEALTH_SECONDS = 60
# The user of GitHub's own image of the runner: images/Dockerfile of github.com/actions/runner.
_USER_ID = 1001

_FOR_ALL = (
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
    "torch": "which module makes torch know the cards",
    "image": "the image that the container is made from, and that its Python has the torch",
    "health": "the program that lists the cards, and what it prints for each",
    "variables": "the variables of the environment",
    "model_cache": "the folder of the models",
}


def render_fleet(fleet: Fleet) -> dict[PurePosixPath, str]:
    """The text of every rendered file, by its path below the repository's root.

    The same fleet gives the same bytes.
    """
    overview = fill("overview.md", vendors=fleet.vendors, runners=list(fleet.runners()))
    files = {FOLDER / "README.md": overview}
    for name in _FOR_ALL:
        files[FOLDER / name] = fill(name, sick=SICK, health_seconds=_HEALTH_SECONDS)
    for vendor in fleet.vendors:
        for name, text in _files_of(vendor, fleet.github):
            files[FOLDER / vendor.name / name] = text
    return files


def values_schema() -> dict[str, Any]:
    """Our JSON Schema of the values that we give to the chart, which ships none of its own.

    It knows fewer forms than the chart takes: a token in place of a secret's name is an error.
    """
    text = Path(__file__).with_name("values.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _files_of(vendor: Vendor, github: GitHub) -> Iterator[tuple[str, str]]:
    of_vendor = {
        "vendor": vendor,
        "github": github,
        "organisation": github.repository.split("/")[0],
        "runners": [Runner(vendor=vendor, kind=kind) for kind in vendor.runners],
        "chart_version": _CHART_VERSION,
        "user_id": _USER_ID,
        "sick": SICK,
        "minutes_beside_job": _MINUTES_BESIDE_JOB,
        "tiers": {tier: TIER_SESSIONS[tier] for tier in LABELLED_TIERS},
        "unverified": [(field, _UNVERIFIED.get(field, field)) for field in vendor.unverified],
    }
    yield "README.md", fill("README.md", **of_vendor)
    if vendor.health:
        yield "health.json", fill("health.json", **of_vendor)
    if vendor.image:
        yield "Containerfile", fill("Containerfile", **of_vendor)
    for kind in vendor.runners:
        runner = Runner(vendor=vendor, kind=kind)
        cards = runner.target.removeprefix(vendor.name)  # "", "-4"
        yield f"runner{cards}.env", fill("runner.env", runner=runner, **of_vendor)
        if vendor.image:
            yield f"values{cards}.yaml", fill("values.yaml", runner=runner, **of_vendor)
            yield f"pod{cards}.yaml", fill("pod.yaml", runner=runner, **of_vendor)
