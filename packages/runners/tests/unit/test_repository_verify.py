"""`assay runners verify` on recorded answers of GitHub: an organization with right settings, and others."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from assay.errors import MachineError
from assay_runners.commands import app
from packages.runners.tests.fake_programs import Programs
from packages.runners.tests.fleet import FLEET, GITHUB, write_fleet

REPOSITORY, ORGANIZATION = f"repos/{GITHUB.repository}", f"orgs/{GITHUB.organization}"
GROUP = f"{ORGANIZATION}/actions/runner-groups"
BRANCH = GITHUB.protected_ref
LABELS = [one.label for one in FLEET.runners()]
UNSEEN = "has no registered runner, as a scale set without a job"
REAPER = [{"name": "ASSAY_REAPER_ROLE"}, {"name": "ASSAY_REAPER_REGION"}]


def environment(name: str, *reviewers: str) -> dict[str, Any]:
    rules = [{"type": "required_reviewers", "reviewers": list(reviewers)}]
    return {"name": name, "protection_rules": rules, "deployment_branch_policy": None}


def runner(label: str) -> dict[str, Any]:
    return {
        "name": f"box-{label}", "status": "online", "version": GITHUB.runner_version,
        "labels": [{"name": label}],
    }  # fmt: skip


RIGHT: dict[str, Any] = {
    REPOSITORY: {"private": False},
    GROUP: {"runner_groups": [{"id": 1, "name": "Default"}, {
        "id": 7, "name": GITHUB.runner_group, "visibility": "selected",
        "allows_public_repositories": True, "restricted_to_workflows": True,
        "selected_workflows": [
            f"{GITHUB.repository}/.github/workflows/accelerator.yml@refs/heads/{BRANCH}"
        ],
    }]},
    f"{GROUP}/7/repositories": {"repositories": [{"full_name": GITHUB.repository}]},
    f"{GROUP}/7/runners": {"runners": [runner(label) for label in LABELS[1:]]},
    f"{REPOSITORY}/environments": {"environments": [
        *(environment(name, "someone") for name in (*LABELS, "bench", "recapture", "release")),
        {"name": "reaper", "deployment_branch_policy": {"custom_branch_policies": True}},
    ]},
    f"{REPOSITORY}/environments/reaper/deployment-branch-policies": {
        "branch_policies": [{"name": BRANCH}]
    },
    f"{REPOSITORY}/teams": [{"slug": "maintainers", "permission": "push"}],
    f"{REPOSITORY}/rules/branches/{BRANCH}": [
        {"type": "required_status_checks", "parameters": {
            "required_status_checks": [{"context": "required"}]
        }},
        {"type": "pull_request", "parameters": {"require_code_owner_review": True}},
    ],
    f"{REPOSITORY}/branches/{BRANCH}/protection": None,
    "graphql": {"data": {"repository": {"mergeQueue": {"id": "x"}}}},
    f"{REPOSITORY}/actions/permissions/workflow": {"can_approve_pull_request_reviews": True},
    f"{REPOSITORY}/labels": [
        {"name": f"{tier}:{name}"} for tier in ("Smoke", "expectations")
        for name in ("cpu", "nvidia", "nvidia-4", "amd", "intel", "gaudi", "gaudi-8", "spyre", "all")
    ],
    f"{REPOSITORY}/actions/variables": {"variables": [
        {"name": "ASSAY_TORCH_INDEX"}, {"name": "ASSAY_RELEASE"},
    ]},
    f"{REPOSITORY}/actions/organization-variables": {"variables": [*REAPER, {"name": "ASSAY_SITE"}]},
    f"{REPOSITORY}/pages": {"build_type": "workflow"},
    f"{ORGANIZATION}/installations": {"installations": [
        {"permissions": {"metadata": "read"}},
        {"permissions": {"organization_self_hosted_runners": "write"}},
    ]},
}  # fmt: skip


def verify(root: Path) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["verify", "--root", str(root)])
    if isinstance(done.exception, MachineError):
        raise done.exception
    lines = done.stdout.splitlines()
    # The first label is that of a scale set without a job.
    unseen = [line for line in lines if line.startswith("not verified: ")]
    no_group = any("group" in line and "does not exist" in line for line in lines)
    assert unseen == ([] if no_group else [f"not verified: {LABELS[0]} {UNSEEN}"])
    return done.exit_code, [line for line in lines if line not in unseen]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_fleet(tmp_path / "checkout")
    set_plan(tmp_path / "checkout", "public")
    return tmp_path / "checkout"


def set_plan(root: Path, plan: str) -> None:
    file = root / "runners/github.toml"
    file.write_text(re.sub("(?m)^plan = .*", f'plan = "{plan}"', file.read_text()))


def test_right_settings_are_green_and_only_read(root: Path, programs: Programs) -> None:
    programs.answers_by_path(RIGHT)
    assert verify(root) == (0, ["all other settings are right"])
    written = {"--method", "-X", "--input", "--field", "-F"}
    assert all(words[:3] == ["api", "--hostname", GITHUB.server] for words in programs.heard)
    assert all(not written & set(words) for words in programs.heard)


def test_a_classic_protection_without_cloud_and_site_is_enough(
    root: Path, programs: Programs
) -> None:
    classic = {
        "required_status_checks": {"contexts": ["required"]},
        "required_pull_request_reviews": {"require_code_owner_reviews": True},
    }
    environments = RIGHT[f"{REPOSITORY}/environments"]["environments"][:-1]
    changed: Any = {
        f"{REPOSITORY}/rules/branches/{BRANCH}": [],
        f"{REPOSITORY}/branches/{BRANCH}/protection": classic,
        f"{REPOSITORY}/actions/organization-variables": {"variables": []},
        f"{REPOSITORY}/environments": {"environments": environments},
        f"{REPOSITORY}/pages": None,
    }
    programs.answers_by_path(RIGHT | changed)
    assert verify(root) == (0, ["all other settings are right"])


WRONG: list[tuple[str, str, str, Any]] = [
    # page, sentence, path of the answer and of the value, new value
    ("runner-groups", f"the group {GITHUB.runner_group} does not exist", f"{GROUP} runner_groups 1 name", "x"),
    ("runner-groups", "not for public", f"{GROUP} runner_groups 1 allows_public_repositories", False),
    ("runner-groups", "accepts other", f"{GROUP} runner_groups 1 restricted_to_workflows", False),
    ("runner-groups", "accepts other", f"{GROUP} runner_groups 1 selected_workflows", ["x@main"]),
    ("runner-groups", "is for no repository, not", f"{GROUP}/7/repositories repositories", []),
    ("runner-groups", "is for o/r, not", f"{GROUP}/7/repositories repositories 0 full_name", "o/r"),
    ("runner-groups", "is for all repositories", f"{GROUP} runner_groups 1 visibility", "all"),
    ("runner-groups", "is online: box", f"{GROUP}/7/runners runners 0 status", "offline"),
    ("runner-groups", "has version 2.99.0", f"{GROUP}/7/runners runners 0 version", "2.99.0"),
    ("environments", f"{LABELS[1]} has no", f"{REPOSITORY}/environments environments 1 name", "x"),
    (
        "environments", f"{LABELS[0]} has no",
        f"{REPOSITORY}/environments environments 0 protection_rules 0 reviewers", [],
    ),
    (
        "environments", f"reaper is not restricted to {BRANCH}",
        f"{REPOSITORY}/environments environments -1 deployment_branch_policy", None,
    ),
    ("environments", "release has no", f"{REPOSITORY}/environments environments -2 name", "x"),
    ("access", "maintainers of CODEOWNERS", f"{REPOSITORY}/teams 0 permission", "pull"),
    ("branches", "the check required", f"{REPOSITORY}/rules/branches/{BRANCH} 0 type", "update"),
    ("branches", "from code owners", f"{REPOSITORY}/rules/branches/{BRANCH} 1 parameters", {}),
    ("branches", "has no merge queue", "graphql data repository mergeQueue", None),
    (
        "actions", "may not create pull requests",
        f"{REPOSITORY}/actions/permissions/workflow can_approve_pull_request_reviews", False,
    ),
    ("labels", "these labels do not exist: smoke:cpu", f"{REPOSITORY}/labels 0 name", "smoke-cpu"),
    ("variables/actions", "ASSAY_TORCH_INDEX", f"{REPOSITORY}/actions/variables variables", []),
    (
        "variables/actions", "ASSAY_REAPER_REGION is not set",
        f"{REPOSITORY}/actions/organization-variables variables 1 name", "x",
    ),
    ("variables/actions", "the source of Pages", f"{REPOSITORY}/pages build_type", "legacy"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "sentence", "place", "value"), WRONG)
def test_each_wrong_setting_is_one_line_with_its_page(
    root: Path, programs: Programs, page: str, sentence: str, place: str, value: object
) -> None:
    answers: Any = deepcopy(RIGHT)
    path, *keys, last = place.split()
    holder = answers[path]
    for key in keys:
        holder = holder[int(key) if isinstance(holder, list) else key]
    holder[int(last) if isinstance(holder, list) else last] = value
    programs.answers_by_path(answers)
    code, (line,) = verify(root)
    assert code == 1
    assert line.startswith("https://")
    assert f"/{page}: " in line
    assert sentence in line


NUM_WRONG = 2 + len(LABELS) + 3


@pytest.mark.parametrize(
    ("plan", "num_lines"),
    [("team", GITHUB.is_enterprise_server * NUM_WRONG), ("public", NUM_WRONG)],
)
def test_what_the_plan_lacks_is_not_wrong(
    root: Path, programs: Programs, plan: str, num_lines: int
) -> None:
    set_plan(root, plan)
    answers: Any = deepcopy(RIGHT)
    answers["graphql"]["data"]["repository"]["mergeQueue"] = None
    answers[GROUP]["runner_groups"][1]["restricted_to_workflows"] = False
    for one in answers[f"{REPOSITORY}/environments"]["environments"]:
        one["protection_rules"] = []
    programs.answers_by_path(answers)
    code, lines = verify(root)
    assert (code, len(lines)) == ((1, num_lines) if num_lines else (0, 1))


def test_a_machine_without_a_cluster_must_have_registered(root: Path, programs: Programs) -> None:
    file = root / "runners/runners.toml"
    file.write_text(file.read_text().replace('image.base = "ubuntu:24.04"\n', ""))
    programs.answers_by_path(RIGHT)
    done = CliRunner().invoke(app, ["verify", "--root", str(root)])
    assert (done.exit_code, f"registered with the label {LABELS[0]}\n" in done.stdout) == (1, True)


def test_what_github_does_not_show_is_said(root: Path, programs: Programs) -> None:
    answers: Any = deepcopy(RIGHT)
    runners = answers[f"{GROUP}/7/runners"]["runners"]
    del runners[0]["version"]
    runners.append(runner(LABELS[0]))
    programs.answers_by_path(answers)
    done = CliRunner().invoke(app, ["verify", "--root", str(root)])
    assert done.stdout.splitlines() == [
        f"not verified: the version of box-{LABELS[1]}", "all other settings are right",
    ]  # fmt: skip
    runners[0]["version"] = GITHUB.runner_version
    programs.answers_by_path(answers)
    done = CliRunner().invoke(app, ["verify", "--root", str(root)])
    assert (done.exit_code, done.stdout) == (0, "all settings are right\n")
    del answers[f"{ORGANIZATION}/installations"]["installations"][1]
    programs.answers_by_path(answers)
    done = CliRunner().invoke(app, ["verify", "--root", str(root)])
    assert done.stdout.startswith("not verified: no GitHub App may register runners")


def test_a_setting_that_gh_may_not_read_is_an_error(root: Path, programs: Programs) -> None:
    programs.answers_by_path(RIGHT)
    programs.refuse(f"{REPOSITORY}/actions/permissions/workflow")
    with pytest.raises(MachineError, match="gh api --hostname failed: HTTP 403: not allowed"):
        verify(root)
    programs.answers_by_path(RIGHT | {f"{REPOSITORY}/teams": None})
    with pytest.raises(MachineError, match="HTTP 404"):
        verify(root)


def test_a_missing_gh_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    message = r"install it from https://cli\.github\.com, run `gh auth"
    with pytest.raises(MachineError, match=message):
        verify(root)
