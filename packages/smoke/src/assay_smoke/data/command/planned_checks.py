"""The checks that a request asks for: of the user's own code, or of the installed libraries."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from assay.plugins import load_object
from assay_smoke.data import protocols, worker_seeds
from assay_smoke.data.accumulation import STEPS, check_accumulation
from assay_smoke.data.batches.packing import check_packing
from assay_smoke.data.batches.padding import check_padding
from assay_smoke.data.command.requests import LEVELS, NOT_ASKED_FOR, DataLevel, DataRequest
from assay_smoke.data.command.tokenizers import ModelTokenizer, open_tokenizer
from assay_smoke.data.libraries import (
    chat_templates,
    collators,
    loaders,
    samplers,
    trainer,
)
from assay_smoke.data.libraries.installed import absent_libraries, is_installed, library_subject
from assay_smoke.data.properties import Subject, SubjectReport
from assay_smoke.data.protocols import Tokenizer
from assay_smoke.data.sampling import BATCH_SAMPLER_PLANS, check_sampling
from assay_smoke.data.text.chat import check_chat
from assay_smoke.data.text.labels import check_labels
from assay_smoke.data.tokens.micro_tokenizer import micro_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """A check of one subject."""

    level: DataLevel
    name: str
    run: Callable[[], SubjectReport]
    is_own: bool = True
    """Whether the user gave the subject. Its exceptions then end the command."""


@dataclass
class ChecksPlan:
    """The checks of a request, and the reasons why levels have none."""

    request: DataRequest
    left_out: dict[DataLevel, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def model(self) -> ModelTokenizer | None:
        """Open the tokenizer of MODEL, if there is one."""
        request = self.request
        return None if request.model is None else open_tokenizer(request.model, request.remote_code)

    def checks(self) -> list[PlannedCheck]:
        """Return all checks in the order of the levels, and fill `left_out` and `notes`."""
        if self.request.model is None and not self.request.own_code:
            found = list(_library_checks())
            self.notes += absent_libraries()
        else:
            found = [*self._chat_checks(), *self._own_checks()]
            self.notes += self.model.notes if self.model else ()
        planned = {check.level for check in found}
        for level in LEVELS:
            if level not in planned:
                self.left_out.setdefault(level, NOT_ASKED_FOR)
        return sorted(found, key=lambda check: LEVELS.index(check.level))

    def _chat_checks(self) -> Iterator[PlannedCheck]:
        render, model = self.request.render, self.model
        if model is not None and (report := model.report) is not None:
            yield PlannedCheck("chat", report.subject, lambda: report)
        if render is not None:
            own = cast("protocols.Render", load_object(render))
            tokenizers = [model.tokenizer] if model else chat_templates.micro_tokenizers()
            yield from self._render_checks(Subject(render), own, tokenizers, labelled=True)
            return
        if model is None:
            return
        if not model.tokenizer.chat_template:
            why = "the tokenizer has no chat template: give --render"
            self.left_out |= {"chat": why, "labels": why}
            return
        labelled = chat_templates.marks_assistant(model.tokenizer)
        if not labelled:
            self.left_out["labels"] = (
                "the chat template has no {% generation %} marks, so transformers cannot tell the"
                " assistant's tokens: give --render"
            )
        subject = Subject(f"chat template of {self.request.model}")
        template = chat_templates.render_by_template
        yield from self._render_checks(subject, template, [model.tokenizer], labelled=labelled)

    def _render_checks(
        self,
        subject: Subject,
        render: protocols.Render,
        tokenizers: Sequence[Tokenizer],
        *,
        labelled: bool,
    ) -> Iterator[PlannedCheck]:
        eos = self.model.eos_token_ids if self.model else ()
        check = partial(
            check_chat, subject, render, tokenizers, eos, truncation=self.request.truncation
        )
        yield PlannedCheck("chat", subject.name, check)
        if labelled:
            yield PlannedCheck(
                "labels", subject.name, partial(check_labels, subject, render, tokenizers)
            )

    def _own_checks(self) -> Iterator[PlannedCheck]:
        own = {name: cast("Any", load_object(file)) for name, file in self.request.own_code.items()}
        tokenizers = [self.model.tokenizer] if self.model else _micro_tokenizers()
        features = self.request.features
        loader = own.get("loader", loaders.torch_loader)
        planned: dict[str, tuple[DataLevel, Any, tuple[Any, ...]]] = {
            "collator": ("collator", check_padding, (tokenizers, features)),
            "packing": ("packing", check_packing, (tokenizers, features)),
            "sampler": ("sampler", check_sampling, ()),
            "batch_sampler": ("batch-sampler", check_sampling, (BATCH_SAMPLER_PLANS,)),
            "accumulation": ("accumulation", check_accumulation, ()),
            "loader": ("workers", worker_seeds.check_loader, ()),
            "dataset": ("workers", worker_seeds.check_dataset, (loader,)),
        }
        for option, (level, check, arguments) in planned.items():
            if option in own:
                name = self.request.own_code[option]
                run = partial(check, Subject(name), own[option], *arguments)
                yield PlannedCheck(level, name, run)


def _micro_tokenizers() -> list[Tokenizer]:
    return [micro_tokenizer("own"), micro_tokenizer("eos")]


def _library_checks() -> Iterator[PlannedCheck]:
    def plan(level: DataLevel, check: Any, subject: Subject, *arguments: Any) -> PlannedCheck:  # noqa: ANN401
        run = partial(check, subject, *arguments)
        return PlannedCheck(level, subject.name, run, is_own=False)

    template = chat_templates.render_by_template
    for case, tokenizers in chat_templates.micro_tokenizers_by_case().items():
        subject = library_subject("transformers", f"apply_chat_template{case}")
        yield plan("chat", check_chat, subject, template, tokenizers)
        yield plan("labels", check_labels, subject, template, tokenizers)
    padding = _micro_tokenizers()
    for subject, collator, kind in collators.padding_collators():
        yield plan("collator", check_padding, subject, collator, padding, kind)
    for subject, collator, kind in collators.packing_collators():
        yield plan("packing", check_packing, subject, collator, padding, kind)
    for subject, open_run in samplers.library_samplers():
        yield plan("sampler", check_sampling, subject, open_run)
    if is_installed("accelerate"):
        subject = library_subject("transformers", "Trainer, resume_from_checkpoint")
        plans = trainer.TRAINER_PLANS
        yield plan("sampler", check_sampling, subject, trainer.TrainerRun, plans)
    subject = library_subject("transformers", "num_items_in_batch")
    yield plan("accumulation", check_accumulation, subject, _backward_by_model_loss)
    if is_installed("accelerate"):
        one_rank = [step for step in STEPS if len(step) == 1]
        subject = library_subject("transformers", "Trainer(gradient_accumulation_steps)")
        yield plan("accumulation", check_accumulation, subject, trainer.trainer_step, one_rank)
    for subject, loader in loaders.library_loaders():
        yield plan("workers", worker_seeds.check_loader, subject, loader)
    for subject, dataset in loaders.library_datasets():
        yield plan("workers", worker_seeds.check_dataset, subject, dataset, loaders.torch_loader)


def _backward_by_model_loss(
    model: "nn.Module",
    micro_batches: Sequence[Mapping[str, "Tensor"]],
    num_step_tokens: int,
    num_ranks: int,
) -> None:
    """Accumulate by the loss of transformers' models, given the label tokens of the step."""
    for micro_batch in micro_batches:
        loss = model(**micro_batch, num_items_in_batch=num_step_tokens).loss
        (loss * num_ranks).backward()
