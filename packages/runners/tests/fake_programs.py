"""Fake programs for nox, gh and aws, and the results that they write."""

import json
import sys
from pathlib import Path

# Replaces `python -m nox`: `-s NAME` records its arguments, writes the content of NAME.left as a verdict, and
# exits with the code in NAME.code.
NOX = """
import json, os, sys
from pathlib import Path
name = sys.argv[sys.argv.index("-s") + 1]
with open("asked.jsonl", "a") as file:
    print(json.dumps([sys.argv[1:], os.environ.get("SEEN", "")]), file=file)
left = Path(f"{name}.left")
if left.is_file():
    folder = Path("runs", f"made-by-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verdict.json").write_text(left.read_text())
    (folder / "cases" / "one").mkdir(parents=True, exist_ok=True)
    (folder / "cases" / "one" / "verdict.json").write_text(left.read_text())
code = Path(f"{name}.code")
raise SystemExit(int(code.read_text()) if code.is_file() else 0)
"""
LOCATION = {
    "phase": "forward", "step": 0, "rank": 0, "module": "model.layers.1.mlp.down_proj",
    "op": None, "parameter": None,
}  # fmt: skip


def verdict(outcome: str) -> str:
    whole = {
        "schema": 1, "verdict": outcome, "command": ["assay", "expect", "verify"],
        "environment": {
            "python": "3.12.3", "versions": {"torch": "2.9.0", "transformers": None},
            "variables": {"ASSAY_CONTAINER": "acme/torch`\n# @1"},
        },
        "model": {}, "reference": {}, "candidate": {},
        "levels": {"modules": {"verdict": outcome}}, "first_bad_token": None,
        "location": LOCATION if outcome == "FAIL" else None, "suspects": [], "diagnosis": None,
        "notes": [], "noise_ratio": 10.5 if outcome == "FAIL" else 0.5, "limit": 3.5,
        "statistic": "replay-tensor", "resolution": 0.007, "compared": 12,
        "unmatched": {"expected": [], "actual": []},
    }  # fmt: skip
    return json.dumps(whole)


# Records its arguments, and prints the content of the file `answer`, or for a path in the file
# `answers` its answer; null is HTTP 404. If the file `refuse` is empty or contains one of
# the arguments, it exits with 4.
PROGRAM = f"""#!{sys.executable}
import json, sys
from pathlib import Path
here = Path(__file__).parent
with open(here / "heard.jsonl", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
refuse = here / "refuse"
if refuse.exists() and refuse.read_text() in ("", *sys.argv):
    print("HTTP 403: not allowed", file=sys.stderr)
    sys.exit(4)
answers = here / "answers"
for word in sys.argv if answers.exists() else ():
    path, _, _ = word.partition("?")
    if path in (known := json.loads(answers.read_text())):
        if known[path] is None:
            sys.exit("gh: Not Found (HTTP 404)")
        print(json.dumps([known[path]] if "--slurp" in sys.argv else known[path]))
        sys.exit()
answer = here / "answer"
asked = bool({{"list", "api", "describe-instances"}} & set(sys.argv))
print(answer.read_text() if answer.exists() and asked else "")
"""


class Programs:
    """The fake gh and aws."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answers(self, value: object) -> None:
        (self.folder / "answer").write_text(json.dumps(value))

    def answers_by_path(self, answers: dict[str, object]) -> None:
        (self.folder / "answers").write_text(json.dumps(answers))

    def refuse(self, word: str = "") -> None:
        (self.folder / "refuse").write_text(word)

    @property
    def heard(self) -> list[list[str]]:
        file = self.folder / "heard.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines]
