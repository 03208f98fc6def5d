"""Compares the settings on GitHub with those that runners/README.md lists."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from assay.errors import MachineError
from assay_runners.fleet.entries import Fleet, GitHub
from assay_runners.planning.labels import list_labels
from assay_runners.workflow_run.programs import run_program

_Object = dict[str, Any]
# https://docs.github.com/graphql/reference/objects#repository; the REST API lists only queues of rulesets.
_QUEUE = "query($owner: String!, $name: String!, $branch: String!) { repository(owner: $owner, name: $name) { mergeQueue(branch: $branch) { id } } }"


@dataclass(frozen=True)
class _Api:
    """The REST API of the server, which only answers questions here."""

    github: GitHub

    @property
    def repository(self) -> str:
        """The path of the repository."""
        return f"repos/{self.github.repository}"

    def ask(self, *words: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(run_program("gh", "api", "--hostname", self.github.server, *words))

    def list_all(self, path: str, key: str = "") -> list[_Object]:
        """List the objects of all pages, which are below `key` if the pages are objects."""
        pages = self.ask("--paginate", "--slurp", f"{path}?per_page=100")
        return [one for page in pages for one in (page[key] if key else page)]

    def find(self, path: str) -> _Object:
        """Return the object, {} if there is none."""
        try:
            found: _Object = self.ask(path)
        except MachineError as error:
            if "HTTP 404" not in str(error):
                raise
            return {}
        return found


@dataclass(frozen=True)
class ComparedSettings:
    """The settings that GitHub shows, compared with the listed ones."""

    wrong: list[str]
    """A sentence for each, with the page on which to change it."""
    unseen: list[str]
    """A sentence for each fact that GitHub does not show."""


def compare_settings(fleet: Fleet) -> ComparedSettings:
    """Compare all settings. Raises: MachineError if gh is missing or may not read one."""
    api = _Api(fleet.github)
    unseen: list[str] = []
    repository = f"https://{fleet.github.server}/{fleet.github.repository}"
    organization = (
        f"https://{fleet.github.server}/organizations/{fleet.github.organization}/settings/actions"
    )
    variables = {
        one["name"]
        for kind in ("variables", "organization-variables")
        for one in api.list_all(f"{api.repository}/actions/{kind}", "variables")
    }
    found = (
        (f"{organization}/runner-groups", _find_group_problems(api, fleet, unseen)),
        (f"{repository}/settings/environments", _find_environment_problems(api, fleet, variables)),
        (f"{repository}/settings/access", _find_team_problems(api)),
        (f"{repository}/settings/branches", _find_branch_problems(api)),
        (f"{repository}/settings/actions", _find_permission_problems(api)),
        (f"{repository}/labels", _find_label_problems(api, fleet)),
        (f"{repository}/settings/variables/actions", _find_variable_problems(api, variables)),
    )
    wrong = [f"{place}: {problem}" for place, problems in found for problem in problems]
    apps = api.list_all(f"orgs/{fleet.github.organization}/installations", "installations")
    if all(one["permissions"].get("organization_self_hosted_runners") != "write" for one in apps):
        unseen.append("no GitHub App may register runners; machines without one need a token")
    return ComparedSettings(wrong, unseen)


def _find_group_problems(api: _Api, fleet: Fleet, unseen: list[str]) -> Iterator[str]:
    github = fleet.github
    groups = api.list_all(f"orgs/{github.organization}/actions/runner-groups", "runner_groups")
    group = next((one for one in groups if one["name"] == github.runner_group), None)
    if group is None:
        yield f"the group {github.runner_group} does not exist"
        return
    path = f"orgs/{github.organization}/actions/runner-groups/{group['id']}"
    allowed = {"all repositories"}
    if group["visibility"] == "selected":
        listed = api.list_all(f"{path}/repositories", "repositories")
        allowed = {one["full_name"] for one in listed}
    if allowed != {github.repository}:
        named = ", ".join(sorted(allowed)) or "no repository"
        yield f"the group {github.runner_group} is for {named}, not for {github.repository} alone"
    if not group["allows_public_repositories"] and not api.ask(api.repository)["private"]:
        yield f"the group {github.runner_group} is not for public repositories"
    workflow = (
        f"{github.repository}/.github/workflows/accelerator.yml@refs/heads/{github.protected_ref}"
    )
    is_restricted = group["restricted_to_workflows"] and group["selected_workflows"] == [workflow]
    if github.has_reviewers and not is_restricted:
        yield f"the group {github.runner_group} accepts other workflows than {workflow}"
    yield from _find_runner_problems(api.list_all(f"{path}/runners", "runners"), fleet, unseen)


def _find_runner_problems(runners: list[_Object], fleet: Fleet, unseen: list[str]) -> Iterator[str]:
    pinned = fleet.github.runner_version
    for runner in fleet.runners():
        label = runner.label
        own = [one for one in runners if label in {each["name"] for each in one["labels"]}]
        if not own and runner.vendor.image:
            unseen.append(f"{label} has no registered runner, as a scale set without a job")
        elif not own:
            yield f"no runner has registered with the label {label}"
        elif all(one["status"] != "online" for one in own):
            yield f"no runner with the label {label} is online: {', '.join(one['name'] for one in own)}"
        for one in own:
            # The documentation of the REST API does not promise the field.
            if not (version := one.get("version")):
                unseen.append(f"the version of {one['name']}")
            elif _numbers_of(version) < _numbers_of(pinned):
                yield f"{one['name']} has version {version}, older than {pinned}"


def _numbers_of(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _find_environment_problems(api: _Api, fleet: Fleet, variables: set[str]) -> Iterator[str]:
    listed = api.list_all(f"{api.repository}/environments", "environments")
    environments = {one["name"]: one for one in listed}
    for name in (*(one.label for one in fleet.runners()), "bench", "recapture"):
        rules = environments.get(name, {}).get("protection_rules", ())
        if fleet.github.has_reviewers and not any(
            rule["type"] == "required_reviewers" and rule["reviewers"] for rule in rules
        ):
            yield f"the environment {name} has no required reviewers"
    if "ASSAY_REAPER_ROLE" not in variables:
        return
    protected = api.github.protected_ref
    policy = environments.get("reaper", {}).get("deployment_branch_policy") or {}
    branches: list[_Object] = []
    if policy.get("custom_branch_policies"):
        path = f"{api.repository}/environments/reaper/deployment-branch-policies"
        branches = api.list_all(path, "branch_policies")
    if [one["name"] for one in branches] != [protected] and not policy.get("protected_branches"):
        yield f"the environment reaper is not restricted to {protected}"


def _find_team_problems(api: _Api) -> Iterator[str]:
    teams = api.list_all(f"{api.repository}/teams")
    writers = {one["slug"] for one in teams if one["permission"] not in ("pull", "triage")}
    if "maintainers" not in writers:
        yield "the team maintainers of CODEOWNERS may not write"


def _find_branch_problems(api: _Api) -> Iterator[str]:
    branch = api.github.protected_ref
    rules: dict[str, list[_Object]] = {}
    for rule in api.list_all(f"{api.repository}/rules/branches/{branch}"):
        rules.setdefault(rule["type"], []).append(rule.get("parameters") or {})
    classic = api.find(f"{api.repository}/branches/{branch}/protection")
    checks = {
        check["context"]
        for rule in rules.get("required_status_checks", ())
        for check in rule["required_status_checks"]
    }.union((classic.get("required_status_checks") or {}).get("contexts", ()))
    if "required" not in checks:
        yield f"{branch} does not require the check required"
    reviews = [*rules.get("pull_request", ()), classic.get("required_pull_request_reviews") or {}]
    names = ("require_code_owner_review", "require_code_owner_reviews")
    if not any(review.get(name) for review in reviews for name in names):
        yield f"{branch} does not require a review from code owners"
    owner, name = api.github.repository.split("/")
    given = (f"query={_QUEUE}", f"owner={owner}", f"name={name}", f"branch={branch}")
    answer = api.ask("graphql", *(word for one in given for word in ("-f", one)))
    if api.github.has_reviewers and not answer["data"]["repository"]["mergeQueue"]:
        yield f"{branch} has no merge queue"


def _find_permission_problems(api: _Api) -> Iterator[str]:
    permissions = api.ask(f"{api.repository}/actions/permissions/workflow")
    if not permissions["can_approve_pull_request_reviews"]:
        yield "GitHub Actions may not create pull requests"


def _find_label_problems(api: _Api, fleet: Fleet) -> Iterator[str]:
    known = {one["name"].casefold() for one in api.list_all(f"{api.repository}/labels")}
    if missing := [label for label in list_labels(fleet) if label not in known]:
        yield f"these labels do not exist: {', '.join(missing)}"


def _find_variable_problems(api: _Api, variables: set[str]) -> Iterator[str]:
    if "ASSAY_TORCH_INDEX" not in variables:
        yield "ASSAY_TORCH_INDEX is not set"
    reaper = {"ASSAY_REAPER_ROLE", "ASSAY_REAPER_REGION"}
    if reaper & variables and reaper - variables:
        yield f"{', '.join(reaper - variables)} is not set"
    if "ASSAY_SITE" not in variables:
        return
    if api.find(f"{api.repository}/pages").get("build_type") != "workflow":
        yield "ASSAY_SITE is set, but the source of Pages is not GitHub Actions"
