from pathlib import Path, PurePosixPath

from assay_runners.fleet import Fleet
from assay_runners.rendering import find_outdated, render_fleet, write_rendered


def without_slab(fleet: Fleet) -> Fleet:
    vendors = tuple(vendor for vendor in fleet.vendors if vendor.name != "slab")
    return fleet.model_copy(update={"vendors": vendors})


def test_a_second_rendering_writes_nothing(root: Path, fleet: Fleet) -> None:
    assert write_rendered(root, fleet) == sorted(render_fleet(fleet))
    assert write_rendered(root, fleet) == []
    assert find_outdated(root, fleet) == {}
    for path, text in render_fleet(fleet).items():
        assert (root / path).read_bytes() == text.encode()


def test_only_scripts_are_executable(written: Path) -> None:
    runnable = {
        path.name for path in written.rglob("*") if path.is_file() and path.stat().st_mode & 0o100
    }
    assert runnable == {"health.sh", "register.sh", "bootstrap.sh"}


def test_each_difference_is_reported_and_rendering_repairs_it(
    root: Path, fleet: Fleet, written: Path
) -> None:
    (written / "acme/values.yaml").unlink()
    (written / "acme/pod.yaml").write_text("edited: by hand\n")
    (written / "health.sh").chmod(0o644)
    folder = PurePosixPath("runners/acme")
    assert find_outdated(root, fleet) == {
        PurePosixPath("runners/health.sh"): "it is not executable",
        folder / "pod.yaml": "it differs from its entry",
        folder / "values.yaml": "it is missing",
    }
    assert [path.name for path in write_rendered(root, fleet)] == [
        "pod.yaml", "values.yaml", "health.sh",
    ]  # fmt: skip
    assert find_outdated(root, fleet) == {}


def test_files_of_a_removed_entry_are_reported_then_deleted(
    root: Path, fleet: Fleet, written: Path
) -> None:
    smaller = without_slab(fleet)
    gone = {
        PurePosixPath("runners/slab", name) for name in ("README.md", "health.json", "runner.env")
    }
    overview = PurePosixPath("runners/README.md")
    assert find_outdated(root, smaller) == {
        overview: "it differs from its entry",
        **dict.fromkeys(gone, "no entry renders it"),
    }
    assert write_rendered(root, smaller) == sorted({overview, *gone})
    assert not (written / "slab").exists()
    assert find_outdated(root, smaller) == {}


def test_a_file_without_the_header_is_never_deleted(
    root: Path, fleet: Fleet, written: Path
) -> None:
    (written / "slab/notes.md").write_text("Speaks of `assay runners render`.\n")
    (written / "slab/photo.png").write_bytes(b"\x89PNG\xff\xfe\n")
    write_rendered(root, without_slab(fleet))
    assert sorted(path.name for path in (written / "slab").iterdir()) == ["notes.md", "photo.png"]
    assert (written / "runners.toml").is_file()
    assert (written / "github.toml").is_file()
