"""A local GitHub that registers runners for a token, or for a GitHub App."""

import base64
import hashlib
import json
import subprocess
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

TOKEN, APP_ID, INSTALLATION = "github_pat_of_nobody", "123456", 42
GROUPS = "/orgs/acme-org/actions/runner-groups"
CONFIGURATION = "/orgs/acme-org/actions/runners/generate-jitconfig"
OF_APP = "/orgs/acme-org/installation"
TOKEN_OF_APP = f"/app/installations/{INSTALLATION}/access_tokens"
# The DigestInfo of SHA-256: RFC 8017, 9.2, note 1.
DIGEST_INFO = bytes.fromhex("3031300d060960864801650304020105000420")


class LocalGitHub(ThreadingHTTPServer):
    """Answers requests with the right credential, and remembers all requests."""

    def __init__(self, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        command = ["openssl", "rsa", "-in", str(key), "-noout", "-modulus"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.modulus = int(printed.partition("=")[2], 16)
        groups = [{"id": 1, "name": "Default"}, {"id": 7, "name": "rockets"}]
        self.answers: dict[str, object] = {
            OF_APP: {"id": INSTALLATION},
            TOKEN_OF_APP: {"token": f"ghs_{TOKEN}"},
            GROUPS: {"runner_groups": groups},
            CONFIGURATION: {"encoded_jit_config": "SklU"},
        }
        self.heard: list[tuple[str, str, str]] = []
        """Path with query, secret and body of each request."""

    def accepts(self, path: str, secret: str) -> bool:
        """Check the secret: an App's signature for its own paths, a token for all others."""
        if path in (OF_APP, TOKEN_OF_APP):
            return self._is_signed(secret)
        return secret in (TOKEN, f"ghs_{TOKEN}")

    def _is_signed(self, jwt: str) -> bool:
        signed, _, signature = jwt.rpartition(".")
        head, claims = (json.loads(_decode(part)) for part in signed.split("."))
        digest = DIGEST_INFO + hashlib.sha256(signed.encode()).digest()
        padded = b"\0\1".ljust(255 - len(digest), b"\xff") + b"\0" + digest
        number = pow(int.from_bytes(_decode(signature)), 65537, self.modulus)
        return (
            head["alg"] == "RS256"
            and claims["iss"] == APP_ID
            and 50 < time.time() - claims["iat"] < 90
            and 0 < claims["exp"] - time.time() < 600
            and number.to_bytes(256) == padded
            and not {*"+/="} & {*jwt}
        )


class _Handler(BaseHTTPRequestHandler):
    server: LocalGitHub

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        secret = self.headers["Authorization"].removeprefix("Bearer ")
        self.server.heard.append((self.path, secret, body))
        path = urlsplit(self.path).path
        answer = self.server.answers.get(path)
        refusal = 404 if answer is None else 401
        self.send_response(200 if answer and self.server.accepts(path, secret) else refusal)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars="-_")
