"""What `<protected>` and the like stand for in the two lists: words of runners/github.toml."""

import re
from collections.abc import Mapping

from assay_runners.fleet.entries import GitHub


def fill(text: str, names: Mapping[str, str]) -> str:
    """`text` with what `<name>` stands for."""
    return re.sub(r"<(\w+)>", lambda found: names.get(found[1], found[0]), text)


def names_of(github: GitHub) -> dict[str, str]:
    """What `<protected>` and the like stand for."""
    return {
        "repository": github.repository, "protected": github.protected_ref,
        "group": github.runner_group, "hosted": github.hosted,
        "nightly": github.nightly, "reaper": github.reaper,
    }  # fmt: skip
