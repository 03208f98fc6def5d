"""The documentation site builds without a warning, and a fault of a page is one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
LIST = "# Documentation\n\n## Reference\n\n| | |\n|---|---|\n| [a](a.md) | a |\n"


def build(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As `nox -s docs`."""
    options = ("-q", "-W", "--keep-going", "-c", str(ROOT / "docs/site"))
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(source), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_has_the_documents_and_the_api(tmp_path: Path) -> None:
    ended = build(ROOT, tmp_path)
    assert ended.returncode == 0, ended.stderr
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    built = {page.relative_to(tmp_path) for page in tmp_path.rglob("*.html")}
    assert {page.relative_to(ROOT).with_suffix(".html") for page in pages} <= built
    assert (tmp_path / "index.html").read_bytes() == (tmp_path / "README.html").read_bytes()
    api = (tmp_path / "docs/site/api.html").read_text(encoding="utf-8")
    for name in ("check_generate", "check_train", "check_load", "compare", "capture", "seed_all"):
        assert f'id="assay.{name}"' in api
    assert "Shard the candidate's heads, features and vocabulary over N ranks." in api
    commands = (tmp_path / "docs/site/commands.html").read_text(encoding="utf-8")
    for name in ("check generate", "smoke run", "bench compare", "ci plan"):
        assert f"Usage: assay {name} " in commands
        assert commands.count(f'href="#assay-{name.replace(" ", "-")}"') > 2
    assert "assay runners" not in commands
    assert (tmp_path / "runners/cpu/README.html").is_file()
    loaded = re.compile(r"""(?:<(?:script|link|img)[^>]+(?:src|href)=|import \w+ from )"https?:""")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), f"{page} needs a network"


# By page, a link and the warning about it.
LINKS = {
    "right": ("[b](b.md)", ""),
    "folder": ("[b](../examples)", ""),
    "absent": ("[b](no-such.md)", "xref_missing"),
    "anchor": ("[b](b.md#no-such)", "xref_missing"),
    "own_anchor": ("[b](#no-such)", "xref_missing"),
    "picture": ("![b](no-such.png)", "image.not_readable"),
}


@pytest.fixture(scope="module")
def site_of_links(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Build a site with a page for each link, once for all of them."""
    source = tmp_path_factory.mktemp("source")
    (source / "docs/site").mkdir(parents=True)
    (source / "examples").mkdir()
    rows = "".join(f"| [{name}]({name}.md) | b |\n" for name in ("b", *LINKS))
    (source / "README.md").write_text("# assay\n")
    (source / "docs/README.md").write_text(LIST.replace("| [a](a.md) | a |\n", rows))
    for name, (text, _) in LINKS.items():
        (source / f"docs/{name}.md").write_text(f"# A\n\n{text}\n")
    (source / "docs/b.md").write_text("# B\n")
    for name in ("api", "commands"):
        (source / f"docs/site/{name}.md").write_text("# A\n")
    return build(source, tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("page", LINKS)
def test_a_broken_link_is_found(site_of_links: subprocess.CompletedProcess[str], page: str) -> None:
    assert site_of_links.returncode == 1
    told = [line for line in site_of_links.stderr.splitlines() if f"docs/{page}.md" in line]
    _, message = LINKS[page]
    assert len(told) == bool(message), site_of_links.stderr
    assert all(message in line for line in told)


def test_a_page_that_no_list_has_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs/site").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# assay\n")
    (tmp_path / "docs/README.md").write_text(LIST)
    for name in ("a", "b", "site/api", "site/commands"):
        (tmp_path / f"docs/{name}.md").write_text("# A\n")
    ended = build(tmp_path, tmp_path / "site")
    assert ended.returncode == 1
    assert "docs/b.md: WARNING: document isn't included in any toctree" in ended.stderr
