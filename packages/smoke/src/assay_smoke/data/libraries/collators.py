"""Collators of transformers and TRL."""

from typing import TYPE_CHECKING

from assay_smoke.data.batches.features import FeatureKind
from assay_smoke.data.checked_code import Subject
from assay_smoke.data.libraries.installed import is_installed, library_subject
from assay_smoke.data.protocols import Collate, MakeCollator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def padding_collators() -> list[tuple[Subject, MakeCollator, FeatureKind]]:
    """Return each subject with its collator and the kind of samples it is for."""
    found: list[tuple[Subject, MakeCollator, FeatureKind]] = [
        (library_subject("transformers", "DataCollatorForSeq2Seq"), _seq2seq, "masked"),
        (
            library_subject("transformers", "DataCollatorForLanguageModeling(mlm=False)"),
            _language_modeling,
            "plain",
        ),
    ]
    if is_installed("trl"):
        subject = library_subject("trl", "DataCollatorForLanguageModeling")
        found.append((subject, _trl_padded, "masked"))
    return found


def packing_collators() -> list[tuple[Subject, MakeCollator, FeatureKind]]:
    """Return collators that put several samples into one row, as `padding_collators` does."""
    found: list[tuple[Subject, MakeCollator, FeatureKind]] = [
        (library_subject("transformers", "DataCollatorWithFlattening"), _flattening, "masked")
    ]
    if is_installed("trl"):
        subject = library_subject("trl", "DataCollatorForLanguageModeling(padding_free=True)")
        found.append((subject, _trl_padding_free, "masked"))
    return found


def _seq2seq(tokenizer: "PreTrainedTokenizerBase") -> Collate:
    from transformers import DataCollatorForSeq2Seq

    collator: Collate = DataCollatorForSeq2Seq(tokenizer)
    return collator


def _language_modeling(tokenizer: "PreTrainedTokenizerBase") -> Collate:
    from transformers import DataCollatorForLanguageModeling

    collator: Collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return collator


def _flattening(_: "PreTrainedTokenizerBase") -> Collate:
    from transformers import DataCollatorWithFlattening

    collator: Collate = DataCollatorWithFlattening()
    return collator


def _trl_padding_free(tokenizer: "PreTrainedTokenizerBase") -> Collate:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator: Collate = DataCollatorForLanguageModeling(
        pad_token_id=tokenizer.pad_token_id, padding_free=True
    )
    return collator


def _trl_padded(tokenizer: "PreTrainedTokenizerBase") -> Collate:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator: Collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    return collator
