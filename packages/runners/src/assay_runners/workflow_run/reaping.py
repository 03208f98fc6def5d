"""Terminates cloud instances past the end of their lifetime.

Each instance gets its own call: a call fails as a whole if it cannot terminate one of its instances.
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_TerminateInstances.html
"""

import http.client
import json
import os
import urllib.request
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from assay.errors import MachineError
from assay_runners.workflow_run.programs import run_program

# docs/runners.md describes how to set it on an instance.
TAG = "assay-expires"
_SECONDS = 120


def find_expired(now: datetime) -> dict[str, str]:
    """Find the instances with a tag that is before `now` or is not a time. Tags default to UTC.

    Returns: the tags, by the id of the instance.
    """
    states = "Name=instance-state-name,Values=running,pending,stopped"
    filters = ("--filters", f"Name=tag-key,Values={TAG}", states)
    found = json.loads(_aws("describe-instances", *filters, "--output", "json"))
    expired = {}
    for reservation in found["Reservations"]:
        for instance in reservation["Instances"]:
            tag = next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == TAG)
            if _is_before(tag, now):
                expired[str(instance["InstanceId"])] = str(tag)
    return expired


def end_instances(ids: Collection[str]) -> None:
    """Terminate all instances.

    Raises: MachineError for those that the cloud or GitHub's identity service refuses.
    """
    refused = []
    for name in ids:
        try:
            _aws("terminate-instances", "--instance-ids", name)
        except MachineError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise MachineError(f"{len(refused)} of {len(ids)} still run:\n" + "\n".join(refused))


def _is_before(tag: str, now: datetime) -> bool:
    try:
        expires = datetime.fromisoformat(tag)
    except ValueError:
        return True
    return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)) < now


def _aws(*words: str) -> str:
    with TemporaryDirectory(prefix="assay-reaper-") as folder:
        variables = {**os.environ, **_fetch_identity(Path(folder))}
        return run_program("aws", "ec2", *words, seconds=_SECONDS, env=variables)


def _fetch_identity(folder: Path) -> dict[str, str]:
    """Fetch an OIDC token, and return the variables with which `aws` assumes the role of the run.

    A token is valid for minutes, so each call of `aws` gets its own.
    """
    url, role = os.environ.get("ACTIONS_ID_TOKEN_REQUEST_URL"), os.environ.get("ASSAY_REAPER_ROLE")
    if not url or not role:
        return {}
    bearer = os.environ.get("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "")
    request = urllib.request.Request(  # noqa: S310 - an address of GitHub
        f"{url}&audience=sts.amazonaws.com", headers={"Authorization": f"bearer {bearer}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310
            token: Any = json.load(answer)
        value = str(token["value"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"GitHub gives the run no identity: {error!r}") from None
    file = folder / "token"
    file.write_text(value, encoding="utf-8")
    return {"AWS_ROLE_ARN": role, "AWS_WEB_IDENTITY_TOKEN_FILE": str(file)}
