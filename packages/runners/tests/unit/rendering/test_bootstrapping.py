import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

Call = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Metal:
    """A machine below a folder, and the archive of a runner with its digest."""

    root: Path
    settings: Path
    archive: Path
    checksum: str
    bootstrap: Call

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()
        )


@pytest.fixture
def metal(
    written: Path, put_program: Callable[[str, str], Path], call: Call, tmp_path: Path
) -> Metal:
    root = tmp_path / "metal"
    (root / "etc/assay-runner").mkdir(parents=True)
    (root / "etc/assay-runner/credential").write_text("secret\n")
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nassay-runner:x:1:1::/:/bin/false\n"
    )
    archive = tmp_path / "runner.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        member = tarfile.TarInfo("run.sh")
        member.size, member.mode = 3, 0o755
        packed.addfile(member, io.BytesIO(b"run"))
    put_program("uname", 'echo "${SYSTEM:-Linux}"')
    put_program("chown", f'echo "$@" >>{tmp_path}/owned')
    put_program("stat", 'echo "${GROUP_OF_NODE:-root}"')
    for name in ("useradd", "usermod", "systemctl", "launchctl", "curl"):
        put_program(name, f'echo {name} "$@" >>{tmp_path}/called; false')
    for name in ("useradd", "usermod"):
        put_program(name, f'echo {name} "$@" >>{tmp_path}/called')

    def bootstrap(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        variables = {"DESTDIR": str(root), **more}
        return call(written / "bare-metal/bootstrap.sh", *arguments, **variables)

    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Metal(root, written / "acme/runner-8.env", archive, checksum, bootstrap)


def called(metal: Metal) -> list[str]:
    file = metal.root.parent / "called"
    return file.read_text().splitlines() if file.is_file() else []


def test_bootstrap_installs_runner_scripts_settings_and_unit(metal: Metal) -> None:
    done = metal.bootstrap(str(metal.settings), str(metal.archive), metal.checksum)
    assert (done.returncode, done.stderr) == (0, "")
    assert metal.files() == [
        "etc/assay-runner/acme-8.env",
        "etc/assay-runner/credential",
        "etc/passwd",
        "etc/systemd/system/assay-runner@.service",
        "etc/systemd/system/multi-user.target.wants/assay-runner@acme-8.service",
        "opt/assay-runner/health.json",
        "opt/assay-runner/health.sh",
        "opt/assay-runner/register.sh",
        "opt/assay-runner/runner/run.sh",
    ]
    assert (metal.root / "etc/assay-runner/acme-8.env").read_bytes() == metal.settings.read_bytes()
    credential = metal.root / "etc/assay-runner/credential"
    assert credential.stat().st_mode & 0o777 == 0o600
    owned = (metal.root.parent / "owned").read_text()
    assert owned == f"{os.getuid()}:{os.getgid()} {credential}\n"
    assert (metal.root / "opt/assay-runner/register.sh").stat().st_mode & 0o777 == 0o755
    wanted = metal.root / "etc/systemd/system/multi-user.target.wants/assay-runner@acme-8.service"
    assert wanted.resolve() == metal.root / "etc/systemd/system/assay-runner@.service"
    assert called(metal) == []


def test_a_newer_runner_replaces_the_old_one(metal: Metal) -> None:
    old = metal.root / "opt/assay-runner/runner/old.sh"
    old.parent.mkdir(parents=True)
    old.touch()
    done = metal.bootstrap(str(metal.settings), str(metal.archive), metal.checksum)
    assert (done.returncode, done.stderr) == (0, "")
    runner = [name for name in metal.files() if name.startswith("opt/assay-runner/runner")]
    assert runner == ["opt/assay-runner/runner/run.sh"]


def test_an_archive_with_another_digest_changes_nothing(metal: Metal) -> None:
    before = metal.files()
    done = metal.bootstrap(str(metal.settings), str(metal.archive), "0" * 64)
    assert done.returncode == 2
    assert f"has the SHA-256 {metal.checksum}, not {'0' * 64}" in done.stderr
    assert metal.files() == before
    assert called(metal) == []


@pytest.mark.parametrize(
    ("words", "destdir", "message"),
    [
        (("https://example.org/x.tar.gz", "latest"), "", "is not a SHA-256"),
        (("https://example.org/x.tar.gz", "A" * 64), "", "is not a SHA-256"),
        (("https://example.org/x.tar.gz", "0" * 63), "", "is not a SHA-256"),
        (("https://example.org/x.tar.gz", "0" * 64), "image", "DESTDIR must start with a slash"),
        ((), "", "usage: sudo "),
    ],
)
def test_nothing_is_downloaded_for_wrong_arguments(
    metal: Metal, words: tuple[str, ...], destdir: str, message: str
) -> None:
    done = metal.bootstrap(str(metal.settings), *words, **({"DESTDIR": destdir} if destdir else {}))
    assert done.returncode == 2
    assert message in done.stderr
    assert called(metal) == []


def test_a_download_with_another_digest_is_refused(
    metal: Metal, put_program: Callable[[str, str], Path]
) -> None:
    copy = 'while [ "$1" != --output ]; do shift; done; cp "$ARCHIVE" "$2"'
    put_program("curl", copy)
    address = "https://example.org/runner.tar.gz"
    words = (str(metal.settings), address)
    assert metal.bootstrap(*words, "0" * 64, ARCHIVE=str(metal.archive)).returncode == 2
    assert metal.bootstrap(*words, metal.checksum, ARCHIVE=str(metal.archive)).returncode == 0
    assert "opt/assay-runner/runner/run.sh" in metal.files()


def test_a_second_runner_with_the_same_cards_is_refused(metal: Metal) -> None:
    (metal.root / "etc/assay-runner/acme.env").touch()
    before = metal.files()
    done = metal.bootstrap(str(metal.settings), str(metal.archive), metal.checksum)
    assert done.returncode == 2
    assert "this machine is already a runner (" in done.stderr
    assert metal.files() == before
    (metal.root / "etc/assay-runner/acme.env").rename(metal.root / "etc/assay-runner/acme-8.env")
    assert metal.bootstrap(str(metal.settings), str(metal.archive), metal.checksum).returncode == 0


def test_nothing_is_installed_without_the_credential(metal: Metal) -> None:
    (metal.root / "etc/assay-runner/credential").unlink()
    done = metal.bootstrap(str(metal.settings), str(metal.archive), metal.checksum)
    assert done.returncode == 2
    assert "write /etc/assay-runner/credential first" in done.stderr
    assert metal.files() == ["etc/passwd"]


def test_the_user_is_created_once_and_joins_the_groups_of_the_cards(metal: Metal) -> None:
    (metal.root / "dev").mkdir()
    (metal.root / "dev/rocket0").touch()
    words = (str(metal.settings), str(metal.archive), metal.checksum)
    passwd = metal.root / "etc/passwd"
    known = passwd.read_text()
    passwd.write_text("root:x:0:0::/root:/bin/sh\n")
    assert metal.bootstrap(*words, GROUP_OF_NODE="render").returncode == 0
    made, joined = called(metal)
    assert made.startswith(f"useradd --root {metal.root} --system --user-group")
    assert joined == f"usermod --root {metal.root} --append --groups render assay-runner"
    passwd.write_text(known)
    assert metal.bootstrap(*words).returncode == 0
    assert called(metal)[2:] == []


def test_a_mac_gets_a_launchd_daemon_instead_of_the_unit(metal: Metal) -> None:
    done = metal.bootstrap(str(metal.settings), str(metal.archive), metal.checksum, SYSTEM="Darwin")
    assert (done.returncode, done.stderr) == (0, "")
    daemon = metal.root / "Library/LaunchDaemons/org.assay.runner.acme-8.plist"
    assert "<string>org.assay.runner.acme-8</string>" in daemon.read_text()
    assert "@TARGET@" not in daemon.read_text()
    assert not (metal.root / "etc/systemd").exists()


# Like launchd, an ending daemon exists for three more calls, during which no other can start.
LAUNCHCTL = """
echo "$1" >>"$STATE/heard"
case $1 in
print)
    [ -e "$STATE/loaded" ] || exit 113
    if [ -e "$STATE/ending" ]; then
        echo x >>"$STATE/ending"
        [ "$(wc -l <"$STATE/ending")" -lt 3 ] || rm "$STATE/ending" "$STATE/loaded"
    fi ;;
bootout) [ -e "$STATE/loaded" ] && touch "$STATE/ending" ;;
bootstrap) [ ! -e "$STATE/loaded" ] && touch "$STATE/loaded" ;;
esac
"""


@pytest.fixture
def bootstrap_mac(
    metal: Metal, call: Call, put_program: Callable[[str, str], Path], tmp_path: Path
) -> Callable[[], list[str]]:
    """Run the script on a Mac with the root `metal.root`. Returns: the commands of launchctl."""
    state = tmp_path / "launchd"
    state.mkdir()
    put_program("launchctl", LAUNCHCTL)
    put_program("id", "echo 0")
    put_program("sleep", "true")
    folder = metal.settings.parents[1] / "bare-metal"
    (folder / "register.sh").write_text('echo "$1" >>"$STATE/heard"\n[ ! -e "$STATE/lacking" ]\n')
    text = (folder / "bootstrap.sh").read_text()
    text = text.replace("$root/", f"{metal.root}/").replace("=/Library", f"={metal.root}/Library")
    (folder / "on_a_mac.sh").write_text(text)
    (folder / "on_a_mac.sh").chmod(0o755)

    def bootstrap() -> list[str]:
        (state / "heard").write_text("")
        words = (str(metal.settings), str(metal.archive), metal.checksum)
        done = call(folder / "on_a_mac.sh", *words, SYSTEM="Darwin", STATE=str(state))
        assert (done.returncode, done.stderr) == (
            (2, "assay: this machine lacks what the lines above name\n")
            if (state / "lacking").exists()
            else (0, "")
        )
        return (state / "heard").read_text().split()

    return bootstrap


def test_a_loaded_daemon_is_started_and_not_replaced(
    bootstrap_mac: Callable[[], list[str]],
) -> None:
    assert bootstrap_mac() == ["--check", "bootout", "print", "bootstrap"]
    assert bootstrap_mac() == ["--check", "print", "kickstart"]


def test_a_machine_that_lacks_something_is_left_alone(
    bootstrap_mac: Callable[[], list[str]], metal: Metal, tmp_path: Path
) -> None:
    (tmp_path / "launchd/lacking").touch()
    before = metal.files()
    assert bootstrap_mac() == ["--check"]
    assert metal.files() == before


def test_a_daemon_with_another_plist_ends_before_the_new_one_starts(
    metal: Metal, bootstrap_mac: Callable[[], list[str]]
) -> None:
    bootstrap_mac()
    (metal.root / "Library/LaunchDaemons/org.assay.runner.acme-8.plist").write_text("old")
    assert bootstrap_mac() == ["--check", "bootout", *["print"] * 4, "bootstrap"]
