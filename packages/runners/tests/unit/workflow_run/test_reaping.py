import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from assay.errors import MachineError
from assay_runners.workflow_run.reaping import end_instances, find_expired
from packages.runners.tests.fake_programs import Programs


def test_expired_instances_are_terminated(programs: Programs) -> None:
    tags = {
        "i-old": "2026-01-01T11:00:00+00:00", "i-new": "2026-01-01T13:00:00+00:00",
        "i-zone": "2026-01-01T12:30:00+01:00", "i-odd": "soon", "i-no-zone": "2026-01-01T11:00:00",
        "i-live": "2026-01-01T13:00:00",
    }  # fmt: skip
    instances = [
        {
            "InstanceId": name,
            "Tags": [{"Key": "Name", "Value": "x"}, {"Key": "assay-expires", "Value": tag}],
        }
        for name, tag in tags.items()
    ]
    programs.answers({"Reservations": [{"Instances": instances[:2]}, {"Instances": instances[2:]}]})
    expired = find_expired(datetime(2026, 1, 1, 12, tzinfo=UTC))
    assert list(expired) == ["i-old", "i-zone", "i-odd", "i-no-zone"]
    end_instances(expired)
    ended = [words[-1] for words in programs.heard if words[1] == "terminate-instances"]
    assert ended == ["i-old", "i-zone", "i-odd", "i-no-zone"]


def test_a_refusal_of_the_cloud_is_an_error(programs: Programs) -> None:
    programs.refuse()
    with pytest.raises(
        MachineError, match=r"^2 of 2 still run:\ni: aws ec2 terminate-instances failed"
    ):
        end_instances(["i", "j"])
    assert [words[-1] for words in programs.heard] == ["i", "j"]


CUT_OFF = b'{"value": "to'


@pytest.fixture
def identities() -> Iterator[tuple[str, list[bytes]]]:
    """Serve GitHub's identity service on loopback. Returns: its address and its pending answers."""
    answers: list[bytes] = []

    class Service(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.pop(0)
            self.send_response(200 if answer else 500)
            if answer.endswith(CUT_OFF):
                self.send_header("Content-Length", "999")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/?x=1", answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("wrong", [b"", b"{}", b"[]", b"no JSON", CUT_OFF])
def test_a_refused_identity_stops_no_other_termination(
    programs: Programs,
    identities: tuple[str, list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    wrong: bytes,
) -> None:
    address, answers = identities
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", address)
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "x")
    monkeypatch.setenv("ASSAY_REAPER_ROLE", "role")
    answers += [wrong, json.dumps({"value": "token"}).encode()]
    with pytest.raises(
        MachineError, match=r"^1 of 2 still run:\ni: GitHub gives the run no identity"
    ):
        end_instances(["i", "j"])
    assert [words[-1] for words in programs.heard] == ["j"]
