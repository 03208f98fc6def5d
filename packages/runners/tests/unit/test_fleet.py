"""The two files that describe the machines: what is read, and what is refused."""

from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_runners.fleet import GITHUB_FILE, RUNNERS_FILE, read_fleet

ROOT = Path(__file__).resolve().parents[4]

ENTRY = """
[acme]
title = "Acme Rocket"
resources = ["acme.com/rocket"]
shown.by = ["dev/rocket[0-9]*"]
torch.from_registry = false
image.base = "acme/pytorch:2.1"
health = { command = ["acme-smi", "list"], card_pattern = "^card" }
runners = [
  { cards = 1, sessions = ["smoke"], timeout_minutes = 60, budget_minutes = 30, max_runners = 1 },
  { cards = 8, sessions = ["smoke"], timeout_minutes = 60, budget_minutes = 30, max_runners = 1 },
]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "runners").mkdir()
    (tmp_path / GITHUB_FILE).write_text((ROOT / GITHUB_FILE).read_text())
    (tmp_path / RUNNERS_FILE).write_text(ENTRY)
    return tmp_path


def test_one_card_is_the_vendor_and_more_are_numbered(root: Path) -> None:
    fleet = read_fleet(root)
    assert [(one.target, one.label) for one in fleet.runners()] == [
        ("acme", "assay-acme"),
        ("acme-8", "assay-acme-8"),
    ]
    assert fleet.find("acme-8") is not None
    assert fleet.find("acme-1") is None


def test_labels_fit_the_limit_of_the_chart() -> None:
    labels = [one.label for one in read_fleet(ROOT).runners()]
    assert len(labels) == len(set(labels)) > 0
    assert max(map(len, labels)) <= 45  # runnerScaleSetName


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Acme Rocket"', "", " [acme]: title: it is missing"),
        (
            'title = "Acme Rocket"',
            'title = "x"\ncolour = "red"',
            "[acme]: colour: there is no such field",
        ),
        ('title = "Acme Rocket"', 'titel = "x"', "titel: there is no such field; nearest is title"),
        (
            "max_runners = 1 },",
            "max_runner = 1 },",
            "max_runner: there is no such field; nearest is max_r",
        ),
        ("[acme]", "[all]", "name: labels use 'all' for every vendor"),
        (
            "cards = 8",
            'cards = "8"',
            "runners[2].cards: it has to be a whole number, without quotes",
        ),
        ('sessions = ["smoke"]', 'sessions = "smoke"', "it has to be an array: [...]"),
        ('sessions = ["smoke"]', 'sessions = ["smoke", "smoke"]', "one is named twice"),
        (
            'sessions = ["smoke"]',
            'sessions = ["smok"]',
            "sessions[1]: it must be 'check', 'smoke'",
        ),
        ("from_registry = false", 'from_registry = "no"', "[acme]: torch.from_registry: "),
        ("shown.by = [", 'shown.pci_vendor = "0x1"\nshown.by = [', "pci_classes go together"),
        ("health = {", 'model_cache = "models"\nhealth = {', "[acme]: model_cache: "),
        ("health = {", 'variables = { "A B" = "c" }\nhealth = {', "[acme]: variables.A B: "),
        ("health = {", 'variables = { PATH = "c" }\nhealth = {', "PATH: the runner sets it"),
        ("shown.by = [", 'shown.pci_vendor = "1002"\nshown.by = [', "[acme]: shown.pci_vendor: "),
        ("[acme]", "[Acme-1]", "[Acme-1]: name: it must match"),
        ('"acme.com/rocket"', '"rocket"', "'rocket' is not a qualified name"),
        ("health = {", "variables = {} #", "health is missing, and a runner has cards"),
        ("cards = 8", "cards = 1", "cards [1, 1] must rise, each number once"),
        ("cards = 8", "cards = 0", "cards [1, 0] must rise, each number once"),
        ("cards = 8", "cards = -1", "[acme]: runners[2].cards: it must be at least 0"),
        ("budget_minutes = 30", "budget_minutes = 60", "leaves no time for installing"),
        ("timeout_minutes = 60", "timeout_minutes = 900", "[acme]: runners[1].timeout_minutes"),
        ("health = {", 'unverified = ["helth"]\nhealth = {', "helth is not a field"),
        ('image.base = "acme/pytorch:2.1"', "", "a pod with a device needs one"),
        (
            'sessions = ["smoke"]',
            "sessions = []",
            "[acme]: runners[2].sessions: it needs at least 1 item",
        ),
        ("[acme]", "acme = 1\n[other]", "acme is outside of a vendor's table"),
        ("[acme]", "[acme", "Expected ']'"),
        (ENTRY, "", "has no vendor"),
    ],
)
def test_a_mistake_is_reported_with_its_file_and_field(
    root: Path, old: str, new: str, message: str
) -> None:
    assert old in ENTRY
    (root / RUNNERS_FILE).write_text(ENTRY.replace(old, new))
    with pytest.raises(UsageError) as caught:
        read_fleet(root)
    assert str(root / RUNNERS_FILE) in str(caught.value)
    assert message in str(caught.value)


def test_all_mistakes_of_an_entry_are_reported_at_once(root: Path) -> None:
    wrong = ENTRY.replace("cards = 8", 'cards = "8"').replace("title", "titel")
    (root / RUNNERS_FILE).write_text(wrong)
    with pytest.raises(UsageError) as caught:
        read_fleet(root)
    lines = str(caught.value).splitlines()
    assert [line.partition("[acme]: ")[2] for line in lines] == [
        "title: it is missing",
        "runners[2].cards: it has to be a whole number, without quotes",
        "titel: there is no such field; nearest is title",
    ]


def test_a_folder_that_is_not_a_checkout_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file; name a checkout of assay with --root"):
        read_fleet(tmp_path)
