"""Traces in S3: real clients against moto's server on loopback."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

import assay
from assay.comparison.contents import describe_contents
from assay.files import Url, parse_location
from assay.trace import RemoteCopy, Trace, list_names
from assay.verdicts import Outcome

pytestmark = pytest.mark.long

SERVER = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
WRITERS = Path(__file__).with_name("writers.py")
NUM_KILLS = 3

SCRIPT = """
import torch
net = torch.nn.Linear(16, 32)
for _ in range(3):
    net(torch.ones(3, 16))
"""


@pytest.fixture(scope="module", autouse=True)
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The bucket `traces`. The name of the server has to be looked up, as that of S3 has."""
    quiet = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with (
        subprocess.Popen([sys.executable, "-c", SERVER], text=True, **quiet) as server,  # type: ignore[call-overload]
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{server.stdout.readline().strip()}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # As in a run whose connections and look-ups are older than some seconds.
        patch.setenv("FSSPEC_S3", '{"config_kwargs": {"connector_args": {"use_dns_cache": false}}}')
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("spools")))
        fsspec.filesystem("s3").mkdir("traces")
        yield
        fsspec.filesystem("s3").clear_instance_cache()
        server.stdin.close()


def run_writers(*arguments: str) -> None:
    subprocess.run([sys.executable, WRITERS, *arguments], check=True, timeout=280)


@pytest.fixture(scope="module")
def whole(bucket: None) -> str:
    """The trace of 64 ranks, written by 8 processes."""
    run_writers("world", "s3://traces/whole")
    return "s3://traces/whole"


def test_ranks_of_a_killed_process_are_named_and_the_others_compared(
    whole: str, tmp_path: Path
) -> None:
    run_writers("world", "s3://traces/cut", "3")
    verdict = assay.compare(whole, "s3://traces/cut", output=tmp_path / "run")
    assert verdict.verdict is Outcome.NOT_COMPARED
    levels = json.loads((tmp_path / "run/verdict.json").read_text())["levels"]
    problems = levels["completeness"]["reason"]
    named = {int(rank) for rank in re.findall(r"s3://traces/cut/rank-(\d+)", problems)}
    assert named == set(range(24, 32))
    assert levels["modules"]["verdict"] == "PASS"
    assert levels["modules"]["compared"] >= 56 * 2  # at least a step of the others


def test_contents_of_all_ranks_are_read_in_place(whole: str) -> None:
    contents = describe_contents(whole)
    assert contents.path == "s3://traces/whole"
    assert contents.ranks == list(range(64))
    assert contents.tensors == 64 * 4 * 2
    assert contents.problems == contents.damaged == []


def count_intact_calls(folder: Path) -> int:
    trace = Trace.open(folder)
    if not trace.calls:
        return 0  # killed before the first index was written
    for call in trace.calls:
        values = trace.tensor(call, "output")
        assert (values.min().item(), values.max().item()) == (call.order, call.order)
    assert [line for line in trace.find_damage() if not line.startswith("index.jsonl")] == []
    return len(trace.calls)


@pytest.mark.parametrize("storage", ["disk", "s3"])
def test_all_that_the_index_lists_survives_a_kill_at_any_moment(
    tmp_path: Path, storage: str
) -> None:
    base = f"{tmp_path}/kills" if storage == "disk" else "s3://traces/kills"
    run_writers("kills", base, str(NUM_KILLS))
    num_calls = 0
    for number in range(NUM_KILLS):
        location = parse_location(f"{base}/{number}")
        if isinstance(location, Url) and list_names(location):
            copy = RemoteCopy(location)
            num_calls += count_intact_calls(copy.path)
        elif isinstance(location, Path) and location.exists():
            num_calls += count_intact_calls(location)
    assert num_calls > 0


def test_a_command_leaves_a_whole_trace(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["capture", "--output", "s3://traces/command", "--min-parameters", "100"]
    done = subprocess.run(
        [sys.executable, "-m", "assay.cli", *words, "--", sys.executable, script],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stderr == "assay: captured s3://traces/command\n"
    assert done.returncode == 0
    copy = RemoteCopy(Url("s3://traces/command"))
    trace = Trace.open(copy.path)
    assert trace.complete
    assert len(trace.calls) == 3
