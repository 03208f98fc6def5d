"""The settings that connect a checkout with an organization on GitHub.

`assay runners init` edits a checkout for another repository, other vendors or another server. `assay runners verify`
compares the settings on GitHub with those that runners/README.md lists.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from assay.devices.run_string import find_vendor_name
from assay.errors import MachineError, UsageError
from assay.files import read_text
from assay_runners.fleet import (
    GITHUB_FILE,
    RUNNERS_FILE,
    Fleet,
    GitHub,
    read_fleet,
    read_vendors,
    validate_entry,
)
from assay_runners.planning import list_labels
from assay_runners.rendering import write_rendered
from assay_runners.workflow_run import run_program

# The files that name the repository, its owner, its runner group or its own actions.
_NAMING_FILES = (
    ".github/CODEOWNERS",
    ".github/*/*.yml",
    "examples/events/*.json",
    "docs/runners.md",
)
# zizmor advises "$/", which GitHub Enterprise Server does not know.
_ZIZMOR_FILE = Path(".github/zizmor.yml")
_ZIZMOR_CONFIGURATION = "rules:\n  self-repository:\n    disable: true\n"
# GitHub Enterprise Server has no artifacts of version 4: https://github.com/actions/upload-artifact#v4---whats-new
_OLD_ARTIFACTS = {
    r"(?<=/upload-artifact@).*": "c6a366c94c3e0affe28c06c8df20a878f24da3cf # v3.2.2",
    r"(?<=/download-artifact@).*": "a9bc5e6ef2cb54c177f32aa5726adaa15e7e2d59 # v3.1.0",
}
_ON_A_BRANCH = " # zizmor: ignore[unpinned-uses] the branch is the boundary"
_RUNNER_LINE = re.compile(r"^ *\{ cards = (\d+),.*\n", re.MULTILINE)
_SESSIONS = re.compile(r"sessions = \[.*?\]")


def initialize(
    root: Path,
    vendors: Sequence[str],
    cards: Mapping[str, Sequence[int]],
    settings: Mapping[str, str],
) -> tuple[Fleet, list[str]]:
    """Write the settings, the chosen vendors, and everything that depends on them.

    vendors: the entries of runners.toml to keep.
    cards: the numbers of cards by vendor; other vendors keep theirs.
    settings: new values of github.toml.
    Returns: the new fleet, and the removed vendors.
    Raises: UsageError, before anything is written, if a value is wrong or a vendor has no entry.
    """
    old = read_fleet(root)
    table = {**old.github.model_dump(), **settings}
    new = validate_entry(GitHub, table, Path("assay runners init"))
    entries = _choose_entries(
        read_text(root / RUNNERS_FILE),
        list(map(find_vendor_name, vendors)),
        {find_vendor_name(name): numbers for name, numbers in cards.items()},
    )
    with TemporaryDirectory() as folder:
        tried = Path(folder, RUNNERS_FILE.name)
        tried.write_text(entries, encoding="utf-8")
        try:
            kept = Fleet(github=new, vendors=tuple(read_vendors(tried)))
        except UsageError as error:
            raise UsageError(str(error).replace(str(tried), "assay runners init")) from None
    edits = _list_edits(old.github, new)
    targets = [runner.target for runner in kept.runners()]
    if gone := [one.target for one in old.runners() if one.target not in targets]:
        places = '(?<=default: )|(?<="vendor": ")|(?<="vendors": ")'
        edits[rf'({places})[^"\n]*\b({"|".join(gone)})\b[^"\n]*'] = targets[0]
    named = (file for pattern in _NAMING_FILES for file in sorted(root.glob(pattern)))
    texts = {file: _edit(read_text(file), edits) for file in named}
    texts[root / GITHUB_FILE] = _with_settings(read_text(root / GITHUB_FILE), settings)
    texts[root / RUNNERS_FILE] = entries
    if new.is_enterprise_server:
        texts[root / _ZIZMOR_FILE] = _ZIZMOR_CONFIGURATION
    else:
        (root / _ZIZMOR_FILE).unlink(missing_ok=True)
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8", newline="\n")
    write_rendered(root, kept)
    names = {vendor.name for vendor in kept.vendors}
    return kept, [vendor.name for vendor in old.vendors if vendor.name not in names]


def read_cards(options: Sequence[str]) -> dict[str, list[int]]:
    """Read options such as "nvidia=1,4". Raises: UsageError."""
    cards = {}
    for option in options:
        if not re.fullmatch(r"\w+=\d+(,\d+)*", option):
            raise UsageError(f"--cards {option}: write VENDOR=NUMBERS, such as nvidia=1,4")
        name, _, numbers = option.partition("=")
        if name in cards:
            raise UsageError(f"--cards {name} is given twice")
        cards[name] = sorted(map(int, numbers.split(",")))
    return cards


def _list_edits(old: GitHub, new: GitHub) -> dict[str, str]:
    """List the patterns and the new texts of the files that name a setting."""
    on_a_branch = _ON_A_BRANCH if "@" in new.job_action else ""
    return {
        r"(?<=uses: )\S+/actions/job\b.*": f"{new.job_action}{on_a_branch}",
        r"(?<=uses: )[$.]/(?=\.github/)": new.own,
        # Except where the original is cloned.
        rf"(?<!clone https://github\.com/)\b{re.escape(old.repository)}\b": new.repository,
        rf"@{re.escape(old.organization)}/": f"@{new.organization}/",
        rf'(?<="login": "){re.escape(old.organization)}(?=")': new.organization,
        rf"(?<=group: ){re.escape(old.runner_group)}$": new.runner_group,
        **(_OLD_ARTIFACTS if new.is_enterprise_server else {}),
    }


def _edit(text: str, edits: Mapping[str, str]) -> str:
    for pattern, new in edits.items():
        text = re.sub(pattern, _as_replacement(new), text, flags=re.MULTILINE)
    return text


def _as_replacement(text: str) -> str:
    """Escape a text for `re.sub`, which reads a backslash as the start of an escape."""
    return text.replace("\\", r"\\")


def _with_settings(text: str, settings: Mapping[str, str]) -> str:
    """Return github.toml with these values, the ones that it lacks at its end."""
    for name, value in settings.items():
        line = f"{name} = {json.dumps(value)}"
        text, count = re.subn(f"(?m)^{name} = .*$", _as_replacement(line), text)
        text += "" if count else f"{line}\n"
    return text


def _choose_entries(text: str, vendors: Sequence[str], cards: Mapping[str, Sequence[int]]) -> str:
    """Return the head of runners.toml, and the entries of the chosen vendors in its order."""
    head, *parts = re.split(r"^(?=\[\w)", text, flags=re.MULTILINE)
    entries = {part[1 : part.index("]")]: part for part in parts}
    for name in vendors:
        if name not in entries:
            raise UsageError(
                f"{RUNNERS_FILE} has no vendor {name}; it has {', '.join(entries)}. The file's history"
                " has the entries that an earlier `init` removed"
            )
    for name in cards:
        if name not in vendors:
            raise UsageError(f"--cards {name}=...: also name the vendor with --vendor {name}")
    kept = [
        _with_cards(entry, cards[name]) if name in cards else entry
        for name, entry in entries.items()
        if name in vendors
    ]
    return head + "".join(kept).rstrip("\n") + "\n"


def _with_cards(entry: str, numbers: Sequence[int]) -> str:
    """Return the entry with a line for each number of cards, a copy of the line with the nearest.

    The fewest cards get all sessions: the vendor's machines would lose `bench`, which only they run.
    """
    lines = {int(found[1]): found[0] for found in _RUNNER_LINE.finditer(entry)}

    def make(number: int) -> str:
        nearest = min(lines, key=lambda known: abs(known - number))
        line = lines[nearest].replace(f"cards = {nearest},", f"cards = {number},")
        if number > min(numbers):
            return line
        return _SESSIONS.sub(max(_SESSIONS.findall("".join(lines.values())), key=len), line)

    before, after = entry.split("".join(lines.values()))
    return before + "".join(map(make, numbers)) + after


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
    release = ["release"] if "ASSAY_RELEASE" in variables else []
    for name in (*(one.label for one in fleet.runners()), "bench", "recapture", *release):
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
