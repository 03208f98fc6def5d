"""Code of installed libraries, in the protocols of users' code: templates, collators, loaders and samplers."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

from assay_smoke.data.batches import FeatureKind
from assay_smoke.data.properties import Subject
from assay_smoke.data.protocols import (
    IGNORED,
    Collate,
    Feature,
    LoaderPlan,
    MakeCollator,
    MakeDataset,
    Message,
    OpenLoader,
    OpenRun,
    RenderedChat,
    ResumePoint,
    Tokenizer,
)
from assay_smoke.data.tokens import micro_tokenizer, template_messages
from assay_smoke.data.worker_seeds import ComputedItems

_OPTIONAL = {
    "accelerate": "its data loader and transformers' Trainer, which needs it, are",
    "trl": "its collator is",
}


def is_installed(library: str) -> bool:
    """Return whether `library` is installed."""
    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True


def absent_libraries() -> list[str]:
    """Return a note for each optional library that is absent."""
    return [
        f"{library} is not installed: {left_out} not checked"
        for library, left_out in _OPTIONAL.items()
        if not is_installed(library)
    ]


def library_subject(library: str, what: str) -> Subject:
    """Name `what` of `library` as reports do: "torch 2.13.0 DistributedSampler"."""
    return Subject(f"{library} {version(library)} {what}")


def marks_assistant(tokenizer: Tokenizer) -> bool:
    """Return True if the template marks the assistant's tokens; a mask needs these marks."""
    template: object = tokenizer.chat_template
    templates = template.values() if isinstance(template, dict) else [template]
    return any(re.search(r"{%[-+]? generation", str(one)) for one in templates)


def render_by_template(
    tokenizer: Tokenizer, messages: Sequence[Message], max_length: int | None
) -> RenderedChat:
    """Render by the template, with labels at transformers' assistant mask."""
    options: dict[str, Any] = {"return_assistant_tokens_mask": marks_assistant(tokenizer)}
    if max_length is not None:
        options |= {"truncation": True, "max_length": max_length}
    chat = template_messages(tokenizer, messages)
    encoded: Any = tokenizer.apply_chat_template(chat, return_dict=True, **options)
    ids = list(encoded["input_ids"])
    mask = encoded.get("assistant_masks", [0] * len(ids))
    labels = [id_ if marked else IGNORED for id_, marked in zip(ids, mask, strict=True)]
    return RenderedChat(input_ids=ids, labels=labels)


def micro_tokenizers() -> list[Tokenizer]:
    """Return tokenizers with and without BOS, padding with their own token and with EOS."""
    return [
        micro_tokenizer("own", "nobody"),
        micro_tokenizer("eos", "template"),
        micro_tokenizer("own", "both"),
    ]


def micro_tokenizers_by_case() -> dict[str, list[Tokenizer]]:
    """Return tokenizers by a description of their special feature, empty for usual ones."""
    cutting_left = micro_tokenizer()
    cutting_left.truncation_side = "left"
    in_two_blocks = micro_tokenizer()
    in_two_blocks.chat_template = str(in_two_blocks.chat_template).replace(
        " + '<|eos|>' }}{% endgeneration %}",
        " }}{% endgeneration %}{% generation %}{{ '<|eos|>' }}{% endgeneration %}",
        1,
    )
    return {
        "": micro_tokenizers(),
        ", truncation_side left": [cutting_left],
        ", text and end in two generation blocks": [in_two_blocks],
    }


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


def library_loaders() -> list[tuple[Subject, OpenLoader]]:
    """Return each subject with its loader."""
    return [
        (library_subject("torch", "DataLoader"), torch_loader),
        (library_subject("transformers", "seed_worker, as in its Trainer"), _transformers_loader),
    ]


def library_datasets() -> list[tuple[Subject, MakeDataset]]:
    """Return transformers' random masking with and without its own seed."""
    what = "DataCollatorForLanguageModeling(mlm=True{})"
    return [
        (library_subject("transformers", what.format("")), partial(_masked, seed=None)),
        (library_subject("transformers", what.format(", seed=0")), partial(_masked, seed=0)),
    ]


def torch_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, _rank: int
) -> Iterable[Iterable[object]]:
    """Open a DataLoader whose workers torch seeds."""
    return _open(dataset, num_workers, None)


def _transformers_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, rank: int
) -> Iterable[Iterable[object]]:
    """Open a DataLoader whose workers transformers seeds."""
    from transformers.trainer_utils import seed_worker

    return _open(dataset, num_workers, partial(seed_worker, num_workers=num_workers, rank=rank))


def _open(dataset: Any, num_workers: int, init: Any) -> Iterable[Iterable[object]]:  # noqa: ANN401
    from torch.utils.data import DataLoader

    loader: Iterable[Iterable[object]] = DataLoader(
        dataset, 2, num_workers=num_workers, collate_fn=list, worker_init_fn=init
    )
    return loader


def _masked(samples: Sequence[Feature], seed: int | None) -> Sequence[object]:
    """Return samples whose tokens a collator masks at random."""
    from transformers import DataCollatorForLanguageModeling

    collator: Any = DataCollatorForLanguageModeling(micro_tokenizer(), seed=seed)
    return ComputedItems(len(samples), lambda item: collator([samples[item]]))


Epochs = Iterator[Iterable[Sequence[int]]]


def library_samplers() -> list[tuple[Subject, OpenRun]]:
    """Return each subject with its data loop."""
    found: list[tuple[Subject, OpenRun]] = [
        (library_subject("torch", "DistributedSampler"), _distributed_sampler)
    ]
    if is_installed("accelerate"):
        subject = library_subject("accelerate", "skip_first_batches, use_seedable_sampler")
        found.append((subject, partial(_accelerate, is_seedable=True)))
        subject = library_subject("accelerate", "skip_first_batches, as by default")
        found.append((subject, _accelerate))
    return found


def _distributed_sampler(plan: LoaderPlan, resumed: ResumePoint | None) -> Epochs:
    """Run torch's DistributedSampler. It cannot resume, so seen batches are drawn and discarded."""
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(
        range(plan.num_samples),  # type: ignore[arg-type] # any sequence
        num_replicas=plan.num_ranks,
        rank=plan.rank,
        shuffle=plan.shuffle,
        seed=plan.seed,
        drop_last=plan.drop_last,
    )
    loader = _open_loader(plan, sampler=sampler)
    return _epochs(plan, resumed, sampler.set_epoch, lambda seen: islice(iter(loader), seen, None))


def _accelerate(
    plan: LoaderPlan, resumed: ResumePoint | None, *, is_seedable: bool = False
) -> Epochs:
    """Run accelerate's loader. By default it draws the order from torch's global generator.

    is_seedable: use a sampler that is seeded by epoch.
    """
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    loader: Any = prepare_data_loader(
        _open_loader(plan, shuffle=plan.shuffle),
        num_processes=plan.num_ranks,
        process_index=plan.rank,
        put_on_device=False,
        **({"use_seedable_sampler": True, "data_seed": plan.seed} if is_seedable else {}),
    )
    return _epochs(
        plan,
        resumed,
        loader.set_epoch,
        lambda seen: skip_first_batches(loader, seen) if seen else loader,
    )


def _open_loader(plan: LoaderPlan, **order: object) -> Any:  # noqa: ANN401 - of torch
    from torch.utils.data import DataLoader

    samples: Any = range(plan.num_samples)
    options: Any = {"num_workers": plan.num_workers, "drop_last": plan.drop_last, **order}
    return DataLoader(samples, plan.batch_size, collate_fn=list, **options)


def _epochs(
    plan: LoaderPlan,
    resumed: ResumePoint | None,
    set_epoch: Callable[[int], None],
    skip: Callable[[int], Iterable[Sequence[int]]],
) -> Epochs:
    """Yield the remaining epochs, the first without its seen batches."""
    first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
    for epoch in range(first, plan.num_epochs):
        set_epoch(epoch)
        yield skip(seen if epoch == first else 0)
