"""The examples in the documents run as printed, from an empty folder, and print what the documents show."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from assay.models.load import load_model
from assay.models.transformers_calls import save_pretrained
from tests.repo.documented_commands import assert_shown, follow

ROOT = Path(__file__).parents[4]

# Pages with the number of outputs that they show.
PAGES = {
    "accelerators": 1,
    "capture": 2,
    "compare": 1,
    "expectations": 1,
    "first-ten-minutes": 5,
    "own-hooks": 1,
    "pytest": 2,
    "smoke": 1,
}


_JOB = """
[machines.box]
run = "cpu/float32"

[[train]]
model = "models/tiny"
candidate-trainer = "ci/trainer.py:Trainer"

[[smoke]]
case = "command:ci/train.toml"
"""

# What the class of the page calls.
_STEP = """

def build_optimizer(model, learning_rate):
    return torch.optim.AdamW(model.parameters(), lr=learning_rate)


def sum_losses(model, micro_batch):
    logits = model(
        input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
    ).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), micro_batch["labels"][:, 1:].flatten(), reduction="sum"
    )
"""


def read_page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PAGES)
def test_the_examples_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    assert follow(read_page(name), tmp_path) == PAGES[name]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_faults_of_trainers_print_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/own_trainer.py").symlink_to(ROOT / "examples/own_trainer.py")
    assert follow(read_page("training"), tmp_path) == 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_trainer_that_is_a_package_passes_the_job_of_the_page(tmp_path: Path) -> None:
    loop = (ROOT / "examples/plain_training/train.py").read_text(encoding="utf-8")
    option = '    parser.add_argument("--device")\n    return parser'
    package = {
        "tinytrain/__init__.py": loop.replace("    return parser", option, 1) + _STEP,
        "tinytrain/__main__.py": "import tinytrain\n\ntinytrain.main()\n",
        "ci/own_trainer.py": (ROOT / "examples/own_trainer.py").read_text(encoding="utf-8"),
        "assay.toml": _JOB,
    }
    for name, text in package.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    model = load_model("micro:llama", dtype="float32").model
    save_pretrained(model, tmp_path / "models/tiny")
    follow(re.sub("(?ms)^```(bash|yaml).*?^```", "", read_page("ci")), tmp_path)

    done = subprocess.run(
        [sys.executable, "-m", "assay.cli", "ci", "run", "box", "--output", "out"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip

    assert done.returncode == 0


def test_the_workflow_before_the_release_has_a_job_for_each_machine_of_the_page() -> None:
    page = read_page("ci")
    (table,) = (one for one in re.findall("(?ms)^```toml\n(.*?)^```", page) if "[machines" in one)
    machines = tomllib.loads(table)["machines"]
    (text,) = re.findall("(?ms)^```yaml\n(.*?)^```", page)
    jobs = YAML(typ="safe").load(text)["jobs"]
    assert {name: [job["runs-on"]] for name, job in jobs.items()} == {
        name: machine["runs-on"] for name, machine in machines.items()
    }
    assert jobs["cpu"]["env"]["PIP_EXTRA_INDEX_URL"] == machines["cpu"]["pip-index"]
    for job in jobs.values():
        assert job["steps"][-1]["uses"].startswith("actions/upload-artifact@")
        assert job["steps"][-1]["if"] == "always()"


def test_the_readme_shows_the_failure_of_the_first_ten_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, shown = text.partition("<!-- failing-output:begin")
    failure, end, _ = shown.partition("```text\n")[2].partition("```\n")
    assert end
    assert failure in read_page("first-ten-minutes")


def test_other_words_are_found() -> None:
    printed = ["✗ FAIL: it", "error 2.0e-2 = 405x the noise", "worst row: 7", "the end"]
    assert_shown(printed, ["✗ FAIL: it", "error 2.1e-2 = 426x the noise", "worst row: 8"])
    assert_shown(printed, ["✗ FAIL: it", "[...]", "the end"])
    for wrong in ("error 2.1e-2 = 426x the sound", "error 2.1e-2 = 526x the noise"):
        with pytest.raises(AssertionError):
            assert_shown(printed, ["✗ FAIL: it", wrong])
    with pytest.raises(AssertionError):
        assert_shown(["2 passed in 1.0s"], ["3 passed in 1.0s"])
    assert_shown(["2 passed in 1.0s"], ["[...]", "2 passed in 2.5s"])
