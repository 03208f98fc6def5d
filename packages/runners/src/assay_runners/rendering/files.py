"""The rendered files: written, and compared with what is committed."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from jinja2 import Environment, PackageLoader, StrictUndefined

from assay_runners.fleet.entries import Fleet, Runner, Vendor

FOLDER = PurePosixPath("runners")
# In one of the first lines of every rendered file: what lacks it is nobody's to delete.
MARK = "Rendered from runners/runners.toml by `assay runners render`"
# Of github.com/actions/runner; the first that knows `uses: $/` is 2.336.0.
RUNNER_VERSION = "2.336.0"
# What a pod may take beyond its job: pulling an image, and ending.
_SPARE_MINUTES = 30
# Files of every vendor, of every vendor with an image, and of all vendors together.
_OF_VENDORS = ("README.md", "health.sh")
_OF_IMAGES = ("Containerfile",)
_OF_ALL = ("bootstrap.sh", "register.sh", "assay-runner@.service", "assay-runner.plist")


def render_fleet(fleet: Fleet) -> dict[PurePosixPath, str]:
    """Every file by its path below the root; the same bytes for the same entries."""
    jinja = _jinja(fleet)
    rendered = {FOLDER / "README.md": jinja.get_template("shared/README.md.j2").render()}
    for name in _OF_ALL:
        rendered[FOLDER / "bare-metal" / name] = jinja.get_template(f"shared/{name}.j2").render()
    for vendor in fleet.vendors:
        runners = [Runner(vendor=vendor, kind=kind) for kind in vendor.runners]
        for path, template, runner in _files_of(vendor, runners):
            text = jinja.get_template(f"vendor/{template}.j2").render(
                vendor=vendor, runner=runner, runners=runners
            )
            rendered[FOLDER / vendor.name / path] = text
    return rendered


def write_rendered(root: Path, fleet: Fleet) -> list[PurePosixPath]:
    """Write what is not there yet or differs, and delete what is of no entry any more.

    Returns: the paths that changed.
    """
    rendered = render_fleet(fleet)
    changed = []
    for path, text in rendered.items():
        if _read(root / path) != text:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
            changed.append(path)
        if path.suffix == ".sh":
            (root / path).chmod(0o755)
    for path in _left_over(root, rendered):
        (root / path).unlink()
        changed.append(path)
    return changed


def find_outdated(root: Path, fleet: Fleet) -> dict[PurePosixPath, str]:
    """What is wrong with a committed file, by its path: it is missing, differs, or is of no entry."""
    rendered = render_fleet(fleet)
    committed = {path: _read(root / path) for path in rendered}
    found = {
        path: "it is not there" if committed[path] is None else "it is not what its entry gives"
        for path, text in rendered.items()
        if committed[path] != text
    }
    return found | dict.fromkeys(_left_over(root, rendered), "it is of no entry any more")


def _files_of(vendor: Vendor, runners: list[Runner]) -> Iterator[tuple[str, str, Runner]]:
    """Path in the vendor's folder, template, and the number of cards that it is for."""
    for name in _OF_VENDORS:
        if name != "health.sh" or vendor.health:
            yield name, name, runners[0]
    if vendor.image:
        for name in _OF_IMAGES:
            yield name, name, runners[0]
    for runner in runners:
        cards = "" if runner.kind.cards <= 1 else f"-{runner.kind.cards}"
        yield f"runner{cards}.env", "runner.env", runner
        if vendor.image:
            yield f"values{cards}.yaml", "values.yaml", runner
            yield f"pod{cards}.yaml", "pod.yaml", runner


def _jinja(fleet: Fleet) -> Environment:
    jinja = Environment(
        loader=PackageLoader("assay_runners.rendering"),
        autoescape=False,  # noqa: S701 - no HTML: YAML by JSON, shell by its own quotes
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters |= {"json": json.dumps, "shell": shlex.quote, "repr": repr, "list_of": list}
    jinja.globals |= {
        "mark": MARK,
        "fleet": fleet,
        "github": fleet.github,
        "owner": fleet.github.repository.split("/")[0],
        "runner_version": RUNNER_VERSION,
        "spare_minutes": _SPARE_MINUTES,
    }
    return jinja


def _left_over(root: Path, rendered: dict[PurePosixPath, str]) -> list[PurePosixPath]:
    found = []
    for file in sorted((root / FOLDER).rglob("*")):
        path = PurePosixPath(file.relative_to(root).as_posix())
        if file.is_file() and path not in rendered and MARK in (_read(file) or "")[:300]:
            found.append(path)
    return found


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
