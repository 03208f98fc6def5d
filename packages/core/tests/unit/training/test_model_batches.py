"""Batches of models of several tasks: their labels, their loss, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from assay.errors import UsageError
from assay.models import load_model
from assay.models.transformers_calls import quiet_transformers
from assay.training.losses import IGNORED
from assay.training.model_batches import TrainingData, plan_data
from assay.training.reports import TrainOptions
from packages.core.tests.zoo.architectures import Architecture, build_tiny

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 300,
    "initializer_range": 0.5,
}


def planned(folder: Path, name: str, change: Any = None, **settings: Any) -> TrainingData:
    """The data of a tiny model of a class of transformers; `change` gets its class."""
    model_class: Any = getattr(transformers, name)
    torch.manual_seed(0)
    with quiet_transformers():
        model_class(model_class.config_class(**(SMALL | settings))).save_pretrained(folder)
    loaded = load_model(str(folder), dtype="float64")
    if change is not None:
        change(loaded.model)
    return plan_data(loaded, TrainOptions(model=str(folder), steps=2))


@pytest.mark.parametrize(
    ("name", "settings", "loss", "ndim"),
    [
        ("LlamaForCausalLM", {}, "next-token", 2),
        ("BertForMaskedLM", {}, "token", 2),
        ("BertForTokenClassification", {"num_labels": 3}, "token", 2),
        ("BertForSequenceClassification", {"num_labels": 3}, "class", 1),
        ("BertForSequenceClassification", {"num_labels": 1}, "regression", 1),
        (
            "BertForSequenceClassification",
            {"num_labels": 3, "problem_type": "regression"},
            "regression",
            2,
        ),
        (
            "BertForSequenceClassification",
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            "multi-label",
            2,
        ),
        ("ViTForImageClassification", {"image_size": 16, "patch_size": 8}, "class", 1),
    ],
)
def test_loss_is_the_one_of_the_model(
    tmp_path: Path, name: str, settings: dict[str, Any], loss: str, ndim: int
) -> None:
    data = planned(tmp_path, name, **settings)

    assert data.loss == loss
    assert not data.notes
    assert not data.other_loss
    assert [one["labels"].ndim for step in data.batches for one in step] == [ndim] * 4
    assert [len(one["labels"]) for step in data.batches for one in step] == [2, 1, 1, 3]
    data.write(tmp_path)
    assert str(TrainingData.read(tmp_path)) == str(data)


def test_decoder_reads_its_labels_shifted(tmp_path: Path) -> None:
    settings = {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 32, "d_kv": 16}
    data = planned(tmp_path, "T5ForConditionalGeneration", decoder_start_token_id=7, **settings)
    one = data.batches[0][0]
    labels, seen = one["labels"], one["decoder_input_ids"]

    assert data.loss == "token"
    assert seen[:, 0].tolist() == [7, 7]
    is_label = labels[:, :-1] != IGNORED
    assert torch.equal(seen[:, 1:][is_label], labels[:, :-1][is_label])
    assert not (seen == IGNORED).any()


def test_tokens_of_an_image_have_no_label(tmp_path: Path) -> None:
    with quiet_transformers():
        model: Any = build_tiny(Architecture("llava", "LlavaForConditionalGeneration"))
        model.save_pretrained(tmp_path)
    data = plan_data(load_model(str(tmp_path), dtype="float64"), TrainOptions(model=str(tmp_path)))

    assert data.loss == "next-token"
    for one in (one for step in data.batches for one in step):
        is_image = one["input_ids"] == model.config.image_token_id
        assert is_image.any(1).tolist() == [True, False, True][: len(is_image)]
        assert (one["labels"][is_image] == IGNORED).all()
        num_images = is_image.sum() // is_image[0].sum()
        assert len(one["pixel_values"]) == num_images == {1: 1, 2: 1, 3: 3}[len(is_image)]


def test_sounds_have_fewer_labels_than_frames_and_no_blank(tmp_path: Path) -> None:
    sizes = {"conv_dim": [8] * 2, "conv_kernel": [10, 8], "conv_stride": [10, 8]}
    data = planned(
        tmp_path, "Wav2Vec2ForCTC", pad_token_id=3, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, **sizes,
    )  # fmt: skip
    labels = [one["labels"] for step in data.batches for one in step]

    assert data.loss == "ctc"
    assert all(not (one == 3).any() and one.shape[1] <= 4000 // 80 // 3 for one in labels)
    assert data.batches[0][0].keys() == {"input_values", "labels"}


def test_texts_of_a_classifying_encoder_decoder_end(tmp_path: Path) -> None:
    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "eos_token_id": 299}
    data = planned(tmp_path, "BartForSequenceClassification", **sizes, **heads)

    assert data.loss == "class"
    for one in (one for step in data.batches for one in step):
        is_end = one["input_ids"] == 299
        assert is_end.sum(1).tolist() == [1] * len(is_end)
        assert (one["attention_mask"].cumsum(1) == one["attention_mask"].sum(1, keepdim=True))[
            is_end
        ].all()


def test_classifier_without_padding_token_gets_several_rows(tmp_path: Path) -> None:
    data = planned(tmp_path, "LlamaForSequenceClassification", pad_token_id=None)

    assert [len(one["labels"]) for step in data.batches for one in step] == [2, 1, 1, 3]


def test_loss_of_a_decoder_that_adds_another_is_named(tmp_path: Path) -> None:
    """A router's loss that is added to that of the tokens."""
    experts = {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 1.0}
    data = planned(tmp_path, "MixtralForCausalLM", **experts)

    assert data.loss == "next-token"
    assert data.other_loss.startswith("the model's own loss is another one: it is ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BertModel", "BertModel cannot be trained: it returns no logits"),
        (
            "BertForQuestionAnswering",
            "BertForQuestionAnswering cannot be trained: it returns no logits",
        ),
    ],
)
def test_model_without_a_known_loss_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(tmp_path, name)


def test_loss_that_is_not_reproduced_is_refused(tmp_path: Path) -> None:
    def smooth(model: Any) -> None:
        model.loss_function = lambda *_args, **_kwargs: torch.tensor(1.5)

    message = "has no loss that assay can train by: it is 1.5, and the class loss of its logits"
    with pytest.raises(UsageError, match=message):
        planned(tmp_path, "ViTForImageClassification", smooth, image_size=16, patch_size=8)
