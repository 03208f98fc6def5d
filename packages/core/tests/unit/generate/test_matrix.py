"""Names of the environments of a matrix."""

from pathlib import Path

from assay.generate.matrix import describe_versions, name_environments


def test_an_environment_is_named_after_its_folder() -> None:
    paths = [Path(p) for p in ("/a/new/bin/python", "/b/new/bin/python", "/old/bin/python")]
    assert name_environments(paths) == {"new": paths[0], "new-2": paths[1], "old": paths[2]}


def test_the_versions_that_are_known_are_listed() -> None:
    packages = {"torch": "2.13.0", "transformers": None, "numpy": "2"}
    assert describe_versions({"packages": packages}) == "torch 2.13.0"
    assert describe_versions({}) == ""
