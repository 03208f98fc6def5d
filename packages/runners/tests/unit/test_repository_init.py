"""`assay runners init` on a copy of this repository with the vendors of the tests."""

import io
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from assay.errors import UsageError
from assay_runners.checking.rules import check_workflows
from assay_runners.commands import app
from assay_runners.fleet import RUNNERS_FILE, read_fleet
from assay_runners.planning import make_plan
from assay_runners.rendering import find_outdated
from assay_runners.workflow_run import read_event
from packages.runners.tests.fleet import FLEET, GITHUB, ROOT, write_fleet

REPOSITORY = ("--repository", "new-owner/checks", "--ghes", "github.com")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_fleet(tmp_path)
    for name in (".github", "examples"):
        ignored = shutil.ignore_patterns("__pycache__")  # of examples that other tests run
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("noxfile.py", "docs/runners.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def init(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["init", "--root", str(root), *words])


def read_texts(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}


def read_texts_without_artifacts(root: Path) -> dict[str, str]:
    """Read the files without the versions of artifacts, which only change for an Enterprise Server."""
    texts = read_texts(root)
    return {name: re.sub("load-artifact@.*", "", text) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("words", "own", "api"),
    [
        ((), "$/", "https://api.github.com"),
        (("--ghes", "git.example.org"), "./", "https://git.example.org/api/v3"),
    ],
)
def test_a_checkout_is_set_up_and_a_mutation_of_it_is_found(
    root: Path, words: tuple[str, ...], own: str, api: str
) -> None:
    others = ("--cards", "nvidia=2,1", "--group", "new-boxes")
    vendors = ("--vendor", "rocm", "--vendor", "nvidia", *others)
    done = init(root, *REPOSITORY, *vendors, *words)
    assert done.exit_code == 0, done.output
    fleet = read_fleet(root)
    assert [one.target for one in fleet.runners()] == ["nvidia", "nvidia-2", "amd"]
    texts = read_texts(root)
    owner = GITHUB.organization
    old = (GITHUB.repository, f"@{owner}/", f'"{owner}"', f"group: {GITHUB.runner_group}\n")
    guide = texts["docs/runners.md"]
    assert "git clone https://github.com/" in guide
    assert (
        "clone https://github.com/new-owner/checks" not in guide
    )  # a setup begins with the original
    texts["docs/runners.md"] = guide.replace(f"clone https://github.com/{GITHUB.repository}", "")
    assert [name for name, text in texts.items() if any(word in text for word in old)] == []
    assert texts[str(RUNNERS_FILE)].startswith("# The vendors of the tests")
    assert {path.name for path in (root / "runners").iterdir() if path.is_dir()} == {
        "amd", "bare-metal", "nvidia",
    }  # fmt: skip
    assert not words or set(re.findall(r"load-artifact@\w+ # v(\d)", str(texts))) == {"3"}
    assert f"\napi={api}\n" in texts["runners/bare-metal/register.sh"]
    assert find_outdated(root, fleet) == {}

    called = "new-owner/checks/.github/workflows/accelerator.yml@main"
    smoke = root / ".github/workflows/smoke.yml"
    smoke.write_text(texts[".github/workflows/smoke.yml"].replace(called, f"{own}{called[17:-5]}"))
    found = check_workflows(root, fleet)
    assert {(one.file.rsplit("/")[-1], one.rule) for one in found} == {
        ("smoke.yml", "machine-guard")
    }


def test_the_old_values_can_be_written_again(root: Path) -> None:
    before = read_texts_without_artifacts(root)
    names = [vendor.name for vendor in read_fleet(root).vendors]
    vendors = [word for name in names for word in ("--vendor", name)]
    changed = init(root, *REPOSITORY, *vendors, "--ghes", "git.example.org", "--group", "x")
    assert changed.exit_code == 0
    assert read_texts_without_artifacts(root) != before
    settings = ("--repository", GITHUB.repository, "--group", GITHUB.runner_group)
    assert init(root, *settings, *vendors, "--ghes", GITHUB.server).exit_code == 0
    assert read_texts_without_artifacts(root) == before


def test_the_fewest_cards_run_all_sessions_and_are_what_dispatches_name(root: Path) -> None:
    for cards in ("gaudi=8", "gaudi=1,8"):
        assert init(root, *REPOSITORY, "--vendor", "gaudi", "--cards", cards).exit_code == 0
        fleet = read_fleet(root)
        assert next(fleet.runners()).kind.sessions == next(FLEET.runners()).kind.sessions
        for workflow in ("bench", "recapture"):
            event = read_event(f"{root}/examples/events/dispatch-{workflow}.json", {})
            assert [job.target for job in make_plan(event, fleet).machines] == ["gaudi-8"]


def test_the_settings_are_those_of_the_plan(root: Path) -> None:
    printed = {
        plan: init(root, *REPOSITORY, "--vendor", "amd", "--plan", plan).stdout
        for plan in ("public", "enterprise", "team", "free")
    }
    settings = printed["public"][printed["public"].index("1. <") :]
    page = "https://github.com/organizations/new-owner/settings/actions/runner-groups"
    assert settings.startswith(f"1. <{page}>:\n   create the")
    page = "https://github.com/new-owner/checks/settings/environments"
    assert f"3. <{page}>:\n   create `assay-amd` `bench`" in settings
    assert "for label in smoke:amd smoke:all expectations:amd expectations:all; do gh" in settings
    assert "No machine has registered with these files yet." in settings
    private = r', and tick "Allow public repositories"|optional, .*: (?=choose the source)'
    assert re.sub(private, "", printed["enterprise"]) == re.sub(private, "", settings)
    assert "optional, because everybody can then read it: choose the source" in printed["team"]
    assert printed["team"].startswith("A private repository with the plan team lacks:")
    assert printed["free"].startswith("A private repository with the plan free lacks:")
    steps = {plan: re.findall(r"^(\d+)\. ", text, re.MULTILINE) for plan, text in printed.items()}
    assert {plan: len(found) for plan, found in steps.items()} == {
        "public": 14, "enterprise": 14, "team": 12, "free": 9,
    }  # fmt: skip
    assert steps["free"] == [*"123456789"]
    for word, plans in (
        ('merge queue"', ("public",)),
        ("`reaper`, restricted", ("public", "team")),
    ):
        assert [plan for plan in ("public", "team", "free") if word in printed[plan]] == [*plans]


def test_a_setting_that_the_file_lacks_is_added(root: Path) -> None:
    file = root / "runners/github.toml"
    file.write_text(re.sub(r"(?m)^plan = .*\n", "", file.read_text()))
    assert read_fleet(root).github.plan == "public"
    assert init(root, *REPOSITORY, "--vendor", "amd", "--plan", "team").exit_code == 0
    assert read_fleet(root).github.plan == "team"


def test_removed_vendors_are_named(root: Path) -> None:
    removed = [one.name for one in read_fleet(root).vendors if one.name != "amd"]
    printed = init(root, *REPOSITORY, "--vendor", "amd").stdout
    assert printed.startswith(f"removed {', '.join(removed)}; they are")
    assert "removed" not in init(root, *REPOSITORY, "--vendor", "amd").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vendor", "amd"), "--repository is missing: OWNER/NAME"),
        (REPOSITORY, "--vendor is missing"),
        ((*REPOSITORY, "--vendor", "tpu"), "has no vendor tpu; it has cpu, nvidia, amd"),
        (
            ("--repository", "checks", "--vendor", "amd"),
            "assay runners init: repository: 'checks' is not OWNER/NAME",
        ),
        (("--repository", "a/b.git", "--vendor", "amd"), "'a/b.git' is not OWNER/NAME"),
        ((*REPOSITORY, "--vendor", "amd", "--ghes", "https://x"), "server: it must match"),
        (
            (*REPOSITORY, "--vendor", "amd", "--cards", "amd=1", "--cards", "amd=2"),
            "--cards amd is given twice",
        ),
        ((*REPOSITORY, "--vendor", "amd", "--cards", "amd"), "write VENDOR=NUMBERS, such as"),
        (
            (*REPOSITORY, "--vendor", "amd", "--cards", "amd=0,1"),
            "assay runners init [amd]: runners: 0 cards and 1 card",
        ),
        ((*REPOSITORY, "--vendor", "amd", "--cards", "cpu=0"), "also name the vendor"),
    ],
)
def test_wrong_options_write_nothing(root: Path, words: tuple[str, ...], message: str) -> None:
    before = read_texts(root)
    done = init(root, *words)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)
    assert read_texts(root) == before


def test_a_person_is_asked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = io.StringIO("new-owner/checks\nnvidia amd\n")
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(SystemExit) as ended:
        app(["init", "--root", str(root)])
    assert ended.value.code == 0
    assert [vendor.name for vendor in read_fleet(root).vendors] == ["nvidia", "amd"]
