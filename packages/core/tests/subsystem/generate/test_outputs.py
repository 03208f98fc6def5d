"""Models without a language-model head: their hidden states, embeddings and scores are judged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from packages.core.tests.subsystem.commands import Finished
from packages.core.tests.subsystem.generate.saved_models import save_random

RunAssay = Callable[..., Finished]

RUNS = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16")
SHORT = ("--prompt-length", "8:24")
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
SCORES: dict[str, Any] = {"num_labels": 3}
ONE_SCORE: dict[str, Any] = {"num_labels": 1}

PLANTS = """
import types


def last_token(model):
    def forward(self, hidden_states):
        return self.activation(self.dense(hidden_states[:, -1]))

    model.pooler.forward = types.MethodType(forward, model.pooler)


def rounded_outputs(model):
    def keep(module, args, output):
        for name in output:
            output[name] = (output[name] * 8).round() / 8
        return output

    model.register_forward_hook(keep)


def scaled_head(model):
    head = getattr(model, "classifier", None) or getattr(model, "qa_outputs", None) or model.score
    head.weight.data *= 1.05
"""


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("embedding"), BertModel, BertConfig(**SIZES), PLANTS)


def test_embedding_model_is_judged_by_its_hidden_states_and_its_embedding(
    embedding: Path, assay: RunAssay
) -> None:
    run = assay("check", "generate", embedding, *RUNS, *SHORT)

    assert run.code == 0, run.stdout
    levels = run.verdict["levels"]
    assert levels["logits"]["reason"] == "the model returns no logits over its vocabulary"
    assert levels["outputs"]["verdict"] == "PASS"
    assert {*levels["outputs"]["outputs"]} == {"last_hidden_state", "pooler_output"}
    assert levels["outputs"]["outputs"]["pooler_output"]["cosine"] > 0.999


@pytest.mark.long
def test_embedding_of_the_last_token_is_found_in_the_pooler(
    embedding: Path, assay: RunAssay
) -> None:
    setup = f"{embedding / 'plants.py'}:last_token"

    run = assay("check", "generate", embedding, *RUNS, *SHORT, "--candidate-setup", setup)

    assert run.code == 1
    assert run.verdict["location"]["module"].startswith("pooler")
    assert run.verdict["levels"]["outputs"]["verdict"] == "FAIL"
    facts = run.verdict["levels"]["outputs"]["outputs"]["pooler_output"]
    assert facts["rank_agreement"] < facts["noise_rank_agreement"]


@pytest.mark.long
@pytest.mark.parametrize("level", ["logits", "modules"])
def test_outputs_that_are_changed_behind_the_last_module_fail(
    level: str, embedding: Path, assay: RunAssay
) -> None:
    setup = f"{embedding / 'plants.py'}:rounded_outputs"

    run = assay(
        "check", "generate", embedding, *RUNS, *SHORT, "--candidate-setup", setup, "--level", level
    )

    assert run.code == 1
    assert run.verdict["levels"]["outputs"]["verdict"] == "FAIL"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "config", "module", "outputs"),
    [
        (BertForSequenceClassification, BertConfig(**SCORES, **SIZES), "classifier", 1),
        (BertForSequenceClassification, BertConfig(**ONE_SCORE, **SIZES), "classifier", 1),
        (BertForTokenClassification, BertConfig(**SCORES, **SIZES), "classifier", 1),
        (BertForQuestionAnswering, BertConfig(**SIZES), "qa_outputs", 2),
        (BertForMultipleChoice, BertConfig(**SIZES), "classifier", 1),
        (
            LlamaForSequenceClassification,
            LlamaConfig(num_key_value_heads=2, pad_token_id=0, **ONE_SCORE, **SIZES),
            "score",
            1,
        ),
    ],
)
def test_scores_pass_and_a_scaled_head_is_found(
    kind: type[PreTrainedModel],
    config: Any,
    module: str,
    outputs: int,
    assay: RunAssay,
    tmp_path: Path,
) -> None:
    model = save_random(tmp_path / "model", kind, config, PLANTS)

    clean = assay("check", "generate", model, *RUNS, *SHORT)
    golden = ("--golden", clean.folder / "golden", "--candidate", RUNS[-1])
    setup = f"{model / 'plants.py'}:scaled_head"
    wrong = assay("check", "generate", model, *golden, "--candidate-setup", setup)

    assert clean.code == 0, clean.stdout
    assert len(clean.verdict["levels"]["outputs"]["outputs"]) == outputs
    assert wrong.code == 1
    assert wrong.verdict["diagnosis"] == "weight-mismatch"
    assert wrong.verdict["location"]["module"] == module
