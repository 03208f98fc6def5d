"""The fleet of the tests: vendors of their own, with the settings of the repository under test."""

import shutil
from pathlib import Path

from assay_runners.fleet import GITHUB_FILE, RUNNERS_FILE, Fleet, read_fleet, read_vendors
from assay_runners.rendering import write_rendered

ROOT = Path(__file__).resolve().parents[3]
VENDORS_FILE = Path(__file__).with_name("runners.toml")
GITHUB = read_fleet(ROOT).github
FLEET = Fleet(github=GITHUB, vendors=tuple(read_vendors(VENDORS_FILE)))


def write_fleet(root: Path) -> None:
    """Write both files and all rendered files below `root`."""
    (root / "runners").mkdir(parents=True)
    shutil.copy(ROOT / GITHUB_FILE, root / GITHUB_FILE)
    shutil.copy(VENDORS_FILE, root / RUNNERS_FILE)
    write_rendered(root, FLEET)
