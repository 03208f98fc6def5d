import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from assay_runners.fleet import read_fleet
from assay_runners.rendering import render_fleet
from packages.runners.tests.fleet import FLEET, ROOT

# The chart ships no schema. Ours is stricter: it refuses a token in place of the name of a secret.
SCHEMA = json.loads(Path(__file__).with_name("values.schema.json").read_text(encoding="utf-8"))


def load(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(text)
    return loaded


def render(name: str) -> dict[str, dict[str, Any]]:
    """Render the files of this repository and of the tests' fleet whose name starts with `name`."""
    files = render_fleet(FLEET) | render_fleet(read_fleet(ROOT))
    found = {str(path): load(text) for path, text in files.items() if path.name.startswith(name)}
    assert len(found) >= len(list(FLEET.runners()))
    return found


def validate_pod(pod: Mapping[str, Any]) -> None:
    kubernetes_validate.validate(dict(pod), kubernetes_validate.latest_version(), strict=True)


@pytest.fixture
def values(rendered: Mapping[str, str]) -> dict[str, Any]:
    return load(rendered["acme/values-8.yaml"])


def test_values_have_the_label_the_resource_and_the_scheduler(values: dict[str, Any]) -> None:
    spec = values.pop("template")["spec"]
    assert values == {
        "githubConfigUrl": "https://github.com/acme-org",
        "githubConfigSecret": "assay-github-app",
        "runnerGroup": "rockets",
        "runnerScaleSetName": "assay-acme-8",
        "scaleSetLabels": ["assay-acme-8"],
        "minRunners": 0,
        "maxRunners": 1,
    }
    assert spec["schedulerName"] == "rocket-scheduler"
    (container,) = spec["containers"]
    assert container["name"] == "runner"
    assert container["command"] == ["/home/runner/run.sh"]
    assert container["resources"] == {"limits": {"acme.com/rocket": 8}}
    assert container["env"] == [{"name": "ASSAY_CARDS", "value": "8"}]


def test_a_pod_with_unfit_cards_takes_no_job(
    values: dict[str, Any], rendered: Mapping[str, str]
) -> None:
    (before,) = values["template"]["spec"]["initContainers"]
    (runner,) = values["template"]["spec"]["containers"]
    assert before["command"] == ["/opt/assay/health.sh"]
    for key in ("image", "env", "resources", "securityContext"):
        assert before[key] == runner[key]
    assert "initContainers" not in load(rendered["plain/values.yaml"])["template"]["spec"]


def test_a_pod_has_only_the_privileges_of_its_job(values: dict[str, Any]) -> None:
    spec = values["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    read_only = {path for path, mount in mounts.items() if mount.get("readOnly")}
    assert read_only == {"/srv/models", "/var/cache/assay/packages"}
    assert set(mounts) - read_only == {"/home/runner/_work", "/dev/shm"}  # noqa: S108 - in a pod
    # 90 minutes of the job and 30 for its image.
    assert spec["activeDeadlineSeconds"] == 7200


def test_a_pod_without_cards_has_no_device_and_no_models(rendered: Mapping[str, str]) -> None:
    spec = load(rendered["plain/values.yaml"])["template"]["spec"]
    assert "resources" not in spec["containers"][0]
    assert "schedulerName" not in spec
    assert [volume["name"] for volume in spec["volumes"]] == ["work", "shared-memory", "packages"]


@pytest.mark.parametrize(
    ("vendor", "command"),
    [("acme", ["/opt/assay/health.sh"]), ("plain", ["python3", "-m", "nox", "--version"])],
)
def test_the_trial_pod_differs_from_the_runner_in_its_command(
    rendered: Mapping[str, str], vendor: str, command: list[str]
) -> None:
    pod = load(rendered[f"{vendor}/pod.yaml"])
    spec = load(rendered[f"{vendor}/values.yaml"])["template"]["spec"]
    assert pod["spec"]["containers"][0]["command"] == command
    spec["containers"][0]["command"] = command
    assert pod["spec"] == spec
    assert pod["metadata"] == {"name": f"assay-{vendor}-trial"}


def test_all_pods_match_the_kubernetes_schema(rendered: Mapping[str, str]) -> None:
    pods = {**render("pod"), "acme": load(rendered["acme/pod-8.yaml"])}
    for pod in pods.values():
        validate_pod(pod)
    assert {pod["kind"] for pod in pods.values()} == {"Pod"}


@pytest.mark.parametrize("place", ["spec", "container"])
def test_a_field_unknown_to_kubernetes_is_refused(rendered: Mapping[str, str], place: str) -> None:
    pod = load(rendered["acme/pod.yaml"])
    holder = pod["spec"] if place == "spec" else pod["spec"]["containers"][0]
    holder["imagePolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePolicy"):
        validate_pod(pod)


def test_all_values_match_our_schema(rendered: Mapping[str, str]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    all_values = {**render("values"), "acme": load(rendered["acme/values-8.yaml"])}
    for values in all_values.values():
        jsonschema.validate(values, SCHEMA, jsonschema.Draft202012Validator)
    names = [values["runnerScaleSetName"] for values in all_values.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runnerLabels": ["a"]}, "'runnerLabels' was unexpected"),
        ({"scaleSetLabels": ["a" * 256]}, "is too long"),
        ({"githubConfigSecret": {"github_token": "ghp_x"}}, "is not of type 'string'"),
        ({"githubConfigUrl": "https://github.com/acme-org/assay"}, "does not match"),
        ({"maxRunners": 0}, "is less than the minimum of 1"),
        ({"template": {"spec": {"containers": [{"name": "other"}]}}}, "does not contain items"),
    ],
)
def test_values_with_a_mistake_are_refused(
    values: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    changed = {**deepcopy(values), **change}
    with pytest.raises(jsonschema.ValidationError) as caught:
        jsonschema.validate(changed, SCHEMA, jsonschema.Draft202012Validator)
    assert message in caught.value.message
