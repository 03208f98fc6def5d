"""Collators of transformers and TRL."""

from functools import partial
from typing import Any

from assay_smoke.data.batches.features import FeatureKind
from assay_smoke.data.libraries.installed import is_installed, library_subject
from assay_smoke.data.properties import Subject
from assay_smoke.data.protocols import Collate, MakeCollator, Tokenizer

Collator = tuple[Subject, MakeCollator, FeatureKind]


def padding_collators() -> list[Collator]:
    """Return each subject with its collator and the kind of samples it is for."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq

    of_plain = library_subject("transformers", "DataCollatorForLanguageModeling(mlm=False)")
    found: list[Collator] = [
        (
            library_subject("transformers", "DataCollatorForSeq2Seq"),
            DataCollatorForSeq2Seq,
            "masked",
        ),
        (of_plain, partial(DataCollatorForLanguageModeling, mlm=False), "plain"),
    ]
    return found + _collators_of_trl("DataCollatorForLanguageModeling")


def packing_collators() -> list[Collator]:
    """Return collators that put several samples into one row, as `padding_collators` does."""
    from transformers import DataCollatorWithFlattening

    subject = library_subject("transformers", "DataCollatorWithFlattening")
    found: list[Collator] = [(subject, lambda _: DataCollatorWithFlattening(), "masked")]
    name = "DataCollatorForLanguageModeling(padding_free=True)"
    return found + _collators_of_trl(name, padding_free=True)


def _collators_of_trl(name: str, **options: Any) -> list[Collator]:  # noqa: ANN401 - of the collator
    if not is_installed("trl"):
        return []
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    def make(tokenizer: Tokenizer) -> Collate:
        collator: Collate = DataCollatorForLanguageModeling(
            pad_token_id=tokenizer.pad_token_id, **options
        )
        return collator

    return [(library_subject("trl", name), make, "masked")]
