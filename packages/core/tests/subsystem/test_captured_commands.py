"""`assay capture -- COMMAND` of scripts that know nothing of assay."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import pytest

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
ranks = "ranks" in sys.argv
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
if "fault" in sys.argv:
    net[2].register_forward_hook(lambda module, arguments, output: output * 1.02)
if ranks:
    torch.distributed.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    loss = nn.functional.mse_loss(net(torch.ones(3, 16) * (step + 1)), torch.ones(3, 4))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if "crash" in sys.argv:
    raise RuntimeError("no more data")
print("printed", sys.argv[1:])
sys.exit(7)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("script") / "train.py"
    file.write_text(SCRIPT)
    return file


def capture(
    output: Path, *command: str | Path, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "assay.cli", "capture", "--output", str(output), "--weights"]
    return subprocess.run(
        [*words, "--min-parameters", "100", *options, "--", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def judged(expected: Path, actual: Path) -> Verdict:
    sides = open_dump(str(expected)), open_dump(str(actual))
    return compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict


@pytest.mark.long
def test_a_script_runs_as_always_and_leaves_a_trace(script: Path, tmp_path: Path) -> None:
    done = {
        name: capture(tmp_path / name, sys.executable, script, "--help", "--", name)
        for name in ("one", "two", "fault")
    }
    for name, one in done.items():
        assert one.returncode == 7, one.stderr
        assert one.stdout == f"printed ['--help', '--', '{name}']\n"
        estimate, end = one.stderr.splitlines()
        assert estimate.startswith("assay: capture takes at most 0.")
        assert end == f"assay: captured {tmp_path / name}"

    assert judged(tmp_path / "one", tmp_path / "two").verdict is Outcome.PASS
    location = judged(tmp_path / "one", tmp_path / "fault").location
    assert location is not None
    assert location.module == "2"


def test_noise_and_operations_of_a_script_are_recorded(script: Path, tmp_path: Path) -> None:
    options = ("--noise-for", "bfloat16", "--level", "op")
    done = capture(tmp_path / "t", sys.executable, script, options=options)

    assert done.returncode == 7, done.stderr
    dump = open_dump(str(tmp_path / "t"))
    assert any(one.site.port == "op.0.linear.output" for one in dump.tensors)
    assert any("bfloat16" in one.noise for one in dump.tensors if one.site.port == "output")


@pytest.mark.long
def test_every_rank_leaves_a_trace(script: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = capture(tmp_path / "t", *launcher, "--nproc-per-node", "2", script, "ranks")

    assert f"assay: captured {tmp_path / 't'}: rank-0, rank-1\n" in done.stderr
    dump = open_dump(str(tmp_path / "t"))
    assert {one.site.at.rank for one in dump.tensors} == {0, 1}
    assert {one.site.at.phase for one in dump.tensors} == {"forward", "backward", "clip"}
    assert not dump.problems


def test_what_was_not_captured_is_said(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    # Without the checkout that this test may run from.
    done = capture(tmp_path / "t", "bash", "-c", f"PYTHONPATH=${{PYTHONPATH%%:*}} {python} -c 1")

    assert done.returncode == 2
    assert f"assay: {python} has no assay, and was not captured" in done.stderr
    assert "assay: nothing was captured: no module with 100 parameters" in done.stderr


@pytest.mark.long
def test_the_trace_of_a_crash_is_incomplete(script: Path, tmp_path: Path) -> None:
    done = capture(tmp_path / "t", sys.executable, script, "crash")

    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: no more data") == 1
    assert any("cut off" in one for one in open_dump(str(tmp_path / "t")).problems)


@pytest.mark.long
def test_a_glob_without_a_match_does_not_stop_the_script(script: Path, tmp_path: Path) -> None:
    done = capture(tmp_path / "t", sys.executable, script, options=("--include", "layer.*"))

    assert done.returncode == 7
    assert "assay: Sequential was not captured: no module of the model matches" in done.stderr


def test_bad_commands_are_refused(script: Path, tmp_path: Path) -> None:
    assert "assay: nosuch cannot be started" in capture(tmp_path / "t", "nosuch").stderr
    assert capture(tmp_path / "t").returncode == 2
    nonsense = capture(tmp_path / "t", sys.executable, script, options=("--steps", "nonsense"))
    assert nonsense.stderr == "assay: 'nonsense' is not a list of ranges such as 0,100:102\n"
    assert nonsense.returncode == 2
    (tmp_path / "t").mkdir(exist_ok=True)
    (tmp_path / "t" / "file").touch()
    refused = capture(tmp_path / "t", sys.executable, script)
    assert refused.stderr == f"assay: {tmp_path / 't'} is not empty\n"
    assert refused.returncode == 2


WAITING = """
import os, sys, time
import torch
torch.nn.Linear(16, 16)(torch.ones(1, 16))
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


def start_waiting(folder: Path, end: str = "") -> tuple[subprocess.Popen[str], int]:
    """Start the capture of a script in a shell. Returns: it, and the process id of the script.

    end: what the shell does after the script. Without it, the script takes the shell's place.
    """
    (folder / "wait.py").write_text(WAITING)
    script = f"{'' if end else 'exec '}{sys.executable} {folder}/wait.py {folder}/pid; {end}"
    words = ["capture", "--output", str(folder / "t"), "--min-parameters", "100", "--"]
    running = subprocess.Popen(
        [sys.executable, "-m", "assay.cli", *words, "bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    while not ((folder / "pid").exists() and (folder / "pid").read_text()):
        assert running.poll() is None
        time.sleep(0.05)
    return running, int((folder / "pid").read_text())


def wait_for_the_end_of(process_id: int, temporary: Path) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process_id}").exists() or any(temporary.glob("assay-capture-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "end", "codes"),
    [
        (signal.SIGINT, "", (130, 1)),  # some versions of torch end a process otherwise
        (signal.SIGTERM, "echo after", (143,)),
        (signal.SIGKILL, "echo after", (-9,)),
    ],
)
def test_a_signal_ends_the_command_and_removes_temporary_files(
    number: signal.Signals, end: str, codes: tuple[int, ...]
) -> None:
    with tempfile.TemporaryDirectory() as made:
        running, process_id = start_waiting(Path(made), end)
        running.send_signal(number)
        assert running.wait(60) in codes
        wait_for_the_end_of(process_id, Path(made))
        assert "after" not in running.communicate()[0]
        assert any("cut off" in one for one in open_dump(str(Path(made, "t"))).problems)


@pytest.mark.long
def test_a_second_capture_into_a_folder_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    running, process_id = start_waiting(tmp_path)
    refused = capture(tmp_path / "t", "true")
    running.terminate()
    running.communicate()
    wait_for_the_end_of(process_id, tmp_path)

    assert refused.returncode == 2
    assert refused.stderr.startswith(f"assay: another capture writes to {tmp_path / 't'}: name a")
    assert "put `assay capture` before the launcher" in refused.stderr


def test_a_command_without_a_capture_fails_and_leaves_no_folder(tmp_path: Path) -> None:
    for command, code in (("true", 2), ("false", 1), ("nosuch", 2)):
        assert capture(tmp_path / "new" / "t", command).returncode == code
        assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_capture_that_the_disk_ended_fails_but_not_its_script(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(WAITING.partition("open(")[0] + "print('ended')")
    script = f"ulimit -f 1; {sys.executable} {tmp_path}/short.py"
    done = capture(tmp_path / "t", "bash", "-c", script)
    assert done.returncode == 2
    assert done.stdout == "ended\n"
    assert "assay: capture ended, and the run goes on: cannot write" in done.stderr
    assert f"assay: without calls, or cut off, in {tmp_path / 't'}: .\n" in done.stderr
