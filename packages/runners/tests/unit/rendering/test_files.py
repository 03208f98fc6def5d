import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator, ValidationError
from ruamel.yaml import YAML

from assay_runners.fleet.reading import GITHUB_FILE, RUNNERS_FILE, read_fleet
from assay_runners.planning.rules import make_plan
from assay_runners.rendering import find_outdated, render_fleet, write_rendered
from packages.runners.tests.recorded import labeled

ROOT = Path(__file__).resolve().parents[5]
SCHEMA = ROOT / "packages/runners/src/assay_runners/rendering/values.schema.json"

ACME = """
[acme]
title = "Acme Rocket"
resources = ["acme.com/rocket"]
scheduler = "acme-scheduler"
shown.by = ["dev/rocket[0-9]*"]
torch.from_registry = false
image.base = "acme/pytorch:2.1"
health = { command = ["acme-smi", "it's"], card_pattern = "^card" }
variables = { ACME_MODE = "two words" }
model_cache = "/models"
runners = [
  { cards = 1, sessions = ["smoke"], timeout_minutes = 60, budget_minutes = 30, max_runners = 3 },
  { cards = 8, sessions = ["smoke"], timeout_minutes = 60, budget_minutes = 30, max_runners = 1 },
]
unverified = ["health"]
"""


def parse(text: str) -> dict[str, Any]:
    parsed: dict[str, Any] = YAML(typ="safe").load(text)
    return parsed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The entries as they are, and one more, with what is committed."""
    shutil.copytree(ROOT / "runners", tmp_path / "runners")
    with (tmp_path / RUNNERS_FILE).open("a", encoding="utf-8") as file:
        file.write(ACME)
    return tmp_path


@pytest.fixture
def rendered(root: Path) -> dict[PurePosixPath, str]:
    return render_fleet(read_fleet(root))


def of(rendered: dict[PurePosixPath, str], name: str) -> str:
    return rendered[PurePosixPath("runners/acme") / name]


def test_what_is_committed_is_up_to_date() -> None:
    assert find_outdated(ROOT, read_fleet(ROOT)) == {}
    assert len(render_fleet(read_fleet(ROOT))) > 60


def test_rendering_twice_gives_the_same_bytes(root: Path) -> None:
    assert render_fleet(read_fleet(root)) == render_fleet(read_fleet(root))


def test_one_entry_adds_a_vendor_to_plan_files_and_documents(
    root: Path, rendered: dict[PurePosixPath, str]
) -> None:
    (machine,) = make_plan(labeled("smoke:acme-8"), read_fleet(root)).machines
    assert (machine.target, machine.cards, machine.variables) == (
        "acme-8",
        8,
        {"ACME_MODE": "two words"},
    )
    assert {path.name for path in rendered if path.parent.name == "acme"} == {
        "README.md", "Containerfile", "health.sh", "runner.env", "runner-8.env", "values.yaml",
        "values-8.yaml", "pod.yaml", "pod-8.yaml",
    }  # fmt: skip
    row = "| [Acme Rocket](acme/README.md) | `smoke:acme`, `smoke:acme-8` | 1, 8 | health |"
    assert row in rendered[PurePosixPath("runners/README.md")].splitlines()


def test_a_scale_set_asks_for_its_cards_and_is_known_by_its_label(
    rendered: dict[PurePosixPath, str],
) -> None:
    values = parse(of(rendered, "values-8.yaml"))
    assert values["scaleSetLabels"] == [values["runnerScaleSetName"]] == ["assay-acme-8"]
    assert (values["runnerGroup"], values["maxRunners"]) == ("assay-accelerators", 1)
    spec = values["template"]["spec"]
    (runner,) = spec["containers"]
    assert runner["resources"] == {"limits": {"acme.com/rocket": 8}}
    assert runner["env"] == [{"name": "ASSAY_CARDS", "value": "8"}]
    assert spec["schedulerName"] == "acme-scheduler"
    assert spec["activeDeadlineSeconds"] == 90 * 60


def test_a_pod_has_no_right_that_a_job_does_not_need(rendered: dict[PurePosixPath, str]) -> None:
    spec = parse(of(rendered, "pod.yaml"))["spec"]
    (runner,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert runner["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounts = {one["name"]: one.get("readOnly", False) for one in runner["volumeMounts"]}
    assert mounts == {"work": False, "shared-memory": False, "models": True}


def test_a_container_takes_the_vendors_torch_and_looks_at_its_cards(
    rendered: dict[PurePosixPath, str],
) -> None:
    lines = of(rendered, "Containerfile").splitlines()
    for line in (
        "ARG BASE_IMAGE=acme/pytorch:2.1",
        "ENV ASSAY_TORCH=system",
        "ENV ACME_MODE='two words'",
        "ENV ACTIONS_RUNNER_HOOK_JOB_STARTED=/opt/assay/health.sh",
        "USER 1001:1001",
    ):
        assert line in lines


def test_all_pods_and_values_are_valid(rendered: dict[PurePosixPath, str]) -> None:
    validator = Draft202012Validator(parse(SCHEMA.read_text(encoding="utf-8")))
    pods = [text for path, text in rendered.items() if path.name.startswith("pod")]
    values = [text for path, text in rendered.items() if path.name.startswith("values")]
    assert len(pods) == len(values) >= 15
    for text in pods:
        kubernetes_validate.validate(parse(text), "1.30", strict=True)
    for text in values:
        validator.validate(parse(text))
        pod = {"apiVersion": "v1", "kind": "Pod", **parse(text)["template"]}
        kubernetes_validate.validate(pod, "1.30", strict=True)


def test_a_field_that_pods_lack_is_refused(rendered: dict[PurePosixPath, str]) -> None:
    pod = parse(of(rendered, "pod.yaml").replace("restartPolicy", "restartPolicies"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, "1.30", strict=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("minRunners", "minimumRunners"),
        ("runnerScaleSetName: assay-acme", f"runnerScaleSetName: {'a' * 46}"),
        ("  - assay-acme\n", '  - ""\n'),
        ("  - assay-acme\n", f"  - {'a' * 256}\n"),
        ("githubConfigSecret: assay-runner-app", "githubConfigSecret: {github_token: x}"),
        ("template:", "containerMode: {type: kubernetes}\ntemplate:"),
        ("template:", "containerMode: {type: docker}\ntemplate:"),
        ("- name: runner", "- name: main"),
        ("maxRunners: 3", "maxRunners: 0"),
    ],
)
def test_values_that_the_chart_would_not_take_are_refused(
    rendered: dict[PurePosixPath, str], old: str, new: str
) -> None:
    text = of(rendered, "values.yaml")
    assert old in text
    validator = Draft202012Validator(parse(SCHEMA.read_text(encoding="utf-8")))
    with pytest.raises(ValidationError):
        validator.validate(parse(text.replace(old, new, 1)))


def test_what_differs_is_missing_or_left_over_is_named_and_then_written(root: Path) -> None:
    fleet = read_fleet(root)
    assert set(find_outdated(root, fleet).values()) == {
        "it is not there",
        "it is not what its entry gives",
    }
    write_rendered(root, fleet)
    assert find_outdated(root, fleet) == {}
    (root / "runners/acme/pod.yaml").write_text("edited")
    (root / "runners/acme/notes.txt").write_text("somebody's own")
    shutil.copy(root / "runners/acme/pod-8.yaml", root / "runners/acme/pod-4.yaml")
    assert find_outdated(root, fleet) == {
        PurePosixPath("runners/acme/pod.yaml"): "it is not what its entry gives",
        PurePosixPath("runners/acme/pod-4.yaml"): "it is of no entry any more",
    }
    changed = write_rendered(root, fleet)
    assert {path.name for path in changed} == {"pod.yaml", "pod-4.yaml"}
    assert (root / "runners/acme/notes.txt").read_text() == "somebody's own"
    assert write_rendered(root, fleet) == []


def test_the_files_are_those_of_the_entries_alone(root: Path) -> None:
    (root / GITHUB_FILE).write_text(
        (ROOT / GITHUB_FILE).read_text().replace("assay-project/", "other/")
    )
    values = parse(of(render_fleet(read_fleet(root)), "values.yaml"))
    assert values["githubConfigUrl"] == "https://github.com/other"
