import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from packages.runners.tests.local_github import (
    APP_ID,
    CONFIGURATION,
    GROUPS,
    OF_APP,
    TOKEN,
    TOKEN_OF_APP,
    LocalGitHub,
)

Call = Callable[..., subprocess.CompletedProcess[str]]
# Records its arguments and its environment before the real one runs.
CURL = f"""
printf '%s\\n' "$@" >>"$SEEN/arguments"
env >>"$SEEN/environment"
exec {shutil.which("curl")} "$@"
"""
# Replaces setpriv, which needs root: records the user, and runs the command.
SETPRIV = """
printf '%s ' "$@" >>"$SEEN/setpriv"
while [[ $1 == --* ]]; do
    [[ $1 == --reuid || $1 == --regid ]] && shift
    shift
done
exec "$@"
"""
RUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$SEEN/run-arguments"
env >"$SEEN/run-environment"
echo registered >>"$SEEN/order"
{then}
"""
# The runner writes this log when a job starts.
JOB = 'mkdir "${0%/*}/_diag"; touch "${0%/*}/_diag/Worker_1.log"'
HEALTH = """
echo health >>"$SEEN/order"
count=$(grep -c health "$SEEN/order")
[[ " ${SICK_AT:-} " != *" $count "* ]] || { echo sick >&2; exit 75; }
"""


@dataclass(frozen=True)
class Machine:
    """A machine on which a runner is installed, and what its stand-ins saw."""

    opt: Path
    state: Path
    seen: Path
    github: LocalGitHub
    credential: Path
    register: Call

    def saw(self, name: str) -> str:
        file = self.seen / name
        return file.read_text() if file.is_file() else ""

    def put_run(self, then: str) -> None:
        (self.opt / "runner/run.sh").write_text(RUN.replace("{then}", then))
        (self.opt / "runner/run.sh").chmod(0o755)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the private key of an App, in the format of GitHub's downloads."""
    file = tmp_path_factory.mktemp("app") / "key.pem"
    subprocess.run(["openssl", "genrsa", "-traditional", "-out", str(file), "2048"], check=True)
    return file


@pytest.fixture
def github(key: Path) -> Iterator[LocalGitHub]:
    with LocalGitHub(key) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()


@pytest.fixture
def machine(
    written: Path,
    put_program: Callable[[str, str], Path],
    call: Call,
    github: LocalGitHub,
    tmp_path: Path,
) -> Machine:
    folders = {name: tmp_path / name for name in ("opt", "state", "seen", "credentials")}
    for folder in folders.values():
        folder.mkdir()
    opt = folders["opt"]
    (opt / "runner").mkdir()
    script = (written / "bare-metal/register.sh").read_text()
    address = f"http://127.0.0.1:{github.server_port}"
    (opt / "register.sh").write_text(script.replace("https://api.github.com", address))
    (opt / "health.sh").write_text(f"#!/usr/bin/env bash\n{HEALTH}")
    (opt / "health.sh").chmod(0o755)
    credential = folders["credentials"] / "credential"
    credential.write_text(f"{TOKEN}\n")
    put_program("curl", CURL)
    put_program("setpriv", SETPRIV)
    put_program("pkill", 'echo pkill >>"$SEEN/order"; echo "$@" >>"$SEEN/pkill"; exit 1')
    put_program("chown", 'printf "%s " "$@" >>"$SEEN/chown"')
    variables = {
        "ASSAY_TARGET": "acme-8",
        "ASSAY_LABEL": "assay-acme-8",
        "ASSAY_ORGANISATION": "acme-org",
        "ASSAY_RUNNER_GROUP": "rockets",
        "ASSAY_CARDS": "8",
        "ASSAY_JOB_MINUTES": "90",
        "ASSAY_USER": "assay-runner",
        "ASSAY_POLL_SECONDS": "0.1",
        "ASSAY_RETRY_SECONDS": "0",
        "ASSAY_RELEASE_SECONDS": "0",
        "STATE_DIRECTORY": str(folders["state"]),
        "CREDENTIALS_DIRECTORY": str(folders["credentials"]),
        "SEEN": str(folders["seen"]),
    }

    def register(**more: str) -> subprocess.CompletedProcess[str]:
        return call(opt / "register.sh", **{**variables, **more})

    made = Machine(opt, folders["state"], folders["seen"], github, credential, register)
    made.put_run(JOB)
    return made


@pytest.mark.parametrize("by_app", [False, True])
def test_the_runner_gets_the_configuration_and_nobody_the_credential(
    machine: Machine, key: Path, by_app: bool
) -> None:
    if by_app:
        machine.credential.write_text(f"{APP_ID}\n{key.read_text()}")
    done = machine.register()
    assert (done.returncode, done.stderr) == (0, "")
    heard = [path.partition("?")[0] for path, _, _ in machine.github.heard]
    assert heard == [*([OF_APP, TOKEN_OF_APP] if by_app else []), GROUPS, CONFIGURATION]
    run = machine.saw("run-environment").splitlines()
    assert "ACTIONS_RUNNER_INPUT_JITCONFIG=SklU" in run
    assert "CREDENTIALS_DIRECTORY" not in machine.saw("run-environment")
    assert f"HOME={machine.state}/home" in run
    # curl has the secrets from a file descriptor, and openssl the key from the file.
    secrets = {secret for _, secret, _ in machine.github.heard} | {key.read_text().splitlines()[1]}
    for place in ("arguments", "environment", "run-arguments", "run-environment", "setpriv"):
        assert machine.saw(place)
        assert not [secret for secret in secrets if secret in machine.saw(place)]
    assert "SklU" not in machine.saw("run-arguments") + machine.saw("setpriv")


@pytest.mark.parametrize("wrong", ["the key of nobody", "the ID of nobody", "no installation"])
def test_an_app_without_access_gets_no_token(machine: Machine, key: Path, wrong: str) -> None:
    app = "nobody" if wrong == "the ID of nobody" else APP_ID
    machine.credential.write_text(f"{app}\n{key.read_text()}")
    if wrong == "the key of nobody":
        machine.github.modulus += 2
    if wrong == "no installation":
        del machine.github.answers[OF_APP]
    done = machine.register()
    assert done.returncode == 1
    message = "GitHub gives the App no token for acme-org: check its ID, key and installation"
    assert done.stderr.splitlines()[1:] == [f"assay: {message}"]  # after the line of curl
    assert [path for path, _, _ in machine.github.heard] == [OF_APP]
    assert machine.saw("run-environment") == ""


def test_it_registers_in_the_group_with_its_label(machine: Machine) -> None:
    names = set()
    for _ in range(2):
        assert machine.register().returncode == 0
        (listed, _, _), (asked, _, text) = machine.github.heard[-2:]
        assert (listed, asked) == (f"{GROUPS}?per_page=100", CONFIGURATION)
        body = json.loads(text)
        names.add(body.pop("name"))
        assert body == {"runner_group_id": 7, "labels": ["assay-acme-8"], "work_folder": "_work"}
    assert len(names) == 2
    assert all("-acme-8-" in name and len(name) <= 64 for name in names)


def test_health_is_checked_before_and_after_the_job_by_the_jobs_user(machine: Machine) -> None:
    assert machine.register().returncode == 0
    assert machine.saw("order").split() == ["health", "registered", "pkill", "health"]
    assert machine.saw("pkill") == "-KILL -u assay-runner\n"
    words = "--reuid assay-runner --regid assay-runner --init-groups --no-new-privs"
    assert machine.saw("setpriv").count(words) == 3
    run = machine.saw("run-environment").splitlines()
    assert f"ACTIONS_RUNNER_HOOK_JOB_STARTED={machine.opt}/health.sh" in run
    assert f"ACTIONS_RUNNER_HOOK_JOB_COMPLETED={machine.opt}/health.sh" in run


def test_a_sick_machine_does_not_register(machine: Machine) -> None:
    done = machine.register(SICK_AT="1")
    assert (done.returncode, done.stderr) == (75, "sick\n")
    assert machine.saw("arguments") == ""
    assert machine.saw("order").split() == ["health"]


def test_a_machine_without_cards_has_no_health_check(machine: Machine) -> None:
    (machine.opt / "health.sh").unlink()
    assert machine.register(ASSAY_CARDS="0").returncode == 0
    assert "JOB_STARTED" not in machine.saw("run-environment")


def test_a_missing_health_script_is_sick(machine: Machine) -> None:
    (machine.opt / "health.sh").unlink()
    assert machine.register().returncode == 75
    assert machine.saw("arguments") == ""


def test_leftovers_of_the_last_job_are_deleted(machine: Machine) -> None:
    for folder in ("home", "runner"):
        (machine.state / folder).mkdir()
        (machine.state / folder / "left").write_text("by a job")
    assert machine.register().returncode == 0
    assert not list(machine.state.rglob("left"))
    assert machine.saw("chown").split() == [
        "-R", "assay-runner", f"{machine.state}/runner", f"{machine.state}/home",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (GROUPS, None, "GitHub does not list the runner groups of acme-org: check the credential"),
        (GROUPS, {"runner_groups": []}, "acme-org has no runner group rockets"),
        (CONFIGURATION, None, "GitHub gives no configuration for assay-acme-8"),
        (CONFIGURATION, {"x": 1}, "GitHub gives no configuration for assay-acme-8"),
    ],
)
def test_a_failure_of_github_exits_with_1(
    machine: Machine, path: str, answer: object, message: str
) -> None:
    machine.github.answers[path] = answer
    done = machine.register()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"assay: {message}"
    assert machine.saw("run-environment") == ""


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        ("exit 2", 1, "the runner ended with exit code 2"),
        ("exit 7", 75, "GitHub requires a newer runner"),
        ("exit 0", 1, "the runner ended without a job"),  # GitHub refuses its configuration
    ],
)
def test_a_runner_that_ends_without_a_job_is_a_failure(
    machine: Machine, ends: str, code: int, message: str
) -> None:
    machine.put_run(ends)
    done = machine.register()
    assert done.returncode == code
    assert message in done.stderr


@pytest.mark.parametrize(("sick_at", "code"), [("2", 0), ("2 3", 75)])
def test_a_machine_that_is_sick_after_a_job_is_checked_again(
    machine: Machine, sick_at: str, code: int
) -> None:
    assert machine.register(SICK_AT=sick_at).returncode == code
    assert machine.saw("order").split() == ["health", "registered", "pkill", "health", "health"]


def test_the_wait_grows_with_each_failure_until_a_job_ends(
    machine: Machine, put_program: Callable[[str, str], Path]
) -> None:
    put_program("sleep", 'echo "$1" >>"$SEEN/sleep"')
    machine.put_run("exit 2")
    for _ in range(9):
        assert machine.register(ASSAY_RETRY_SECONDS="30").returncode == 1
    slept = [float(line) for line in machine.saw("sleep").split()]
    waited = [seconds for seconds in slept if seconds != 0.1]  # the poll of the job
    assert waited == [0, 30, 90, 210, 450, 930, 1890, 1890, 1890]
    machine.put_run(JOB)
    assert machine.register().returncode == 0
    machine.put_run("exit 2")
    assert machine.register(ASSAY_RETRY_SECONDS="30").returncode == 1
    assert machine.saw("sleep").split()[-1] == "0"


def test_a_job_over_its_time_limit_takes_the_machine_down(machine: Machine) -> None:
    machine.put_run(f"{JOB}; exec sleep 50")
    started = time.monotonic()
    done = machine.register(ASSAY_JOB_MINUTES="0")
    assert done.returncode == 75
    assert "its job did not end within 0 minutes" in done.stderr
    assert time.monotonic() - started < 20


def test_waiting_for_a_job_has_no_time_limit(machine: Machine) -> None:
    machine.put_run(f"sleep 2.5; {JOB}")
    assert machine.register(ASSAY_JOB_MINUTES="0").returncode == 0
