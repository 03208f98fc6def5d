"""Published bugs of loading, which both sides of a check share: `assay check load` asks the files."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from packages.core.tests.faults.published.models import make_model

BYTES = {chr(number): number for number in range(256)}
TOKENS = BYTES | {"<bos>": 256, "<eos>": 257, "<pad>": 258, "<unk>": 259}
CHAT = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def check_load(model: Path, output: Path) -> dict[str, Any]:
    """The verdict of `assay check load`."""
    command = [
        sys.executable,
        "-m",
        "assay.cli",
        "check",
        "load",
        str(model),
        "--output",
        str(output),
    ]
    subprocess.run(command, check=False, capture_output=True, timeout=300)
    verdict: dict[str, Any] = json.loads((output / "verdict.json").read_text(encoding="utf-8"))
    return verdict


def under_new_name(folder: Path) -> None:
    """DeepSpeed#8345: theta stands where the code that is run does not look."""
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["rope_params"] = settings.pop("rope_parameters")
    path.write_text(json.dumps(settings), encoding="utf-8")


def as_they_are(folder: Path) -> None:
    """No fault."""
    assert folder.is_dir()


def with_template(chat: str, pad: str = "<pad>") -> Callable[[Path], None]:
    """A tokenizer that begins texts by BOS where the chat template does not."""

    def save(folder: Path) -> None:
        words = Tokenizer(models.WordLevel(TOKENS, "<unk>"))
        words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        words.post_processor = processors.TemplateProcessing(
            single="$A", special_tokens=[("<bos>", 256)]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=chat)
        special: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
        tokenizer.add_special_tokens(special | {"pad_token": pad})
        tokenizer.save_pretrained(folder)

    return save


@pytest.mark.parametrize(
    ("bug", "plant", "control", "diagnosis", "told"),
    [
        (
            "rope-theta-v5-getattr",
            under_new_name,
            as_they_are,
            "checkpoint-mismatch",
            "rope_params",
        ),
        (
            "double-bos",
            with_template("{{ bos_token }}" + CHAT),
            with_template(CHAT),
            "inputs-differ",
            "begins with 2 BOS tokens",
        ),
        (
            "collator-eos-masked",
            with_template(CHAT, pad="<eos>"),
            with_template(CHAT),
            None,  # a tokenizer may be so: a note
            "padding is EOS",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_load_is_told(
    bug: str,
    plant: Callable[[Path], None],
    control: Callable[[Path], None],
    diagnosis: str | None,
    told: str,
    tmp_path: Path,
) -> None:
    verdicts = []
    for name, change in (("plant", plant), ("control", control)):
        folder = Path(make_model("llama, theta 500000", tmp_path / name))
        change(folder)
        verdicts.append(check_load(folder, tmp_path / f"{name}-run"))
    planted, clean = verdicts

    assert planted["diagnosis"] == diagnosis, bug
    assert told in json.dumps(planted["notes"]) + json.dumps(planted["levels"])
    assert clean["verdict"] == "PASS"
    assert told not in json.dumps(clean["notes"]) + json.dumps(clean["levels"])
