"""Which checks a request asks for: the user's own code, or else that of the installed libraries."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from assay.plugins import load_object
from assay_smoke.data import protocols, worker_seeds
from assay_smoke.data.accumulation import check_accumulation
from assay_smoke.data.batches.packing import check_packing
from assay_smoke.data.batches.padding import check_padding
from assay_smoke.data.command import requests
from assay_smoke.data.command.tokenizers import ModelTokenizer, open_tokenizer
from assay_smoke.data.libraries import (
    accumulation,
    chat_templates,
    collators,
    loaders,
    samplers,
    trainer_resume,
)
from assay_smoke.data.libraries.installed import absent_libraries, is_installed, library_subject
from assay_smoke.data.order.sampling import BATCH_SAMPLER_PLANS, check_sampling
from assay_smoke.data.properties import SubjectReport
from assay_smoke.data.running_code import Subject
from assay_smoke.data.text.chat import check_chat
from assay_smoke.data.text.labels import check_labels
from assay_smoke.data.tokens.micro_tokenizer import micro_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """One subject to check. is_own: given by the user, so that what it raises ends the command."""

    subject: requests.Subject
    name: str
    run: Callable[[], SubjectReport]
    is_own: bool = True


@dataclass
class ChecksPlan:
    """The checks of a request, and why other subjects have none."""

    request: requests.DataRequest
    left_out: dict[requests.Subject, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def model(self) -> ModelTokenizer | None:
        """The tokenizer of MODEL; None without one."""
        request = self.request
        return None if request.model is None else open_tokenizer(request.model, request.remote_code)

    @property
    def _tokenizers(self) -> list["PreTrainedTokenizerBase"]:
        if self.model is not None:
            return [self.model.tokenizer]
        return [micro_tokenizer("own"), micro_tokenizer("eos")]

    def checks(self) -> list[PlannedCheck]:
        """All of them, in the order of the subjects; fills `left_out` and `notes`."""
        if self.request.model is None and not self.request.own_code:
            found = list(_library_checks())
            self.notes += absent_libraries()
        else:
            found = [*self._chat_checks(), *self._own_checks()]
            self.notes += self.model.notes if self.model else ()
        planned = {check.subject for check in found}
        for subject in requests.SUBJECTS:
            if subject not in planned:
                self.left_out.setdefault(subject, requests.NOT_ASKED_FOR)
        return sorted(found, key=lambda check: requests.SUBJECTS.index(check.subject))

    def _chat_checks(self) -> Iterator[PlannedCheck]:
        render, model = self.request.render, self.model
        if model is not None and model.report is not None:
            yield PlannedCheck("chat", model.report.subject, partial(_identity, model.report))
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
                "the chat template has no {% generation %} marks, so that transformers knows no"
                " assistant tokens: give --render"
            )
        subject = Subject(f"chat template of {self.request.model}")
        template = chat_templates.render_by_template
        yield from self._render_checks(subject, template, [model.tokenizer], labelled=labelled)

    def _render_checks(
        self,
        subject: Subject,
        render: protocols.Render,
        tokenizers: Sequence["PreTrainedTokenizerBase"],
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
        request, tokenizers = self.request, self._tokenizers
        own = {name: cast("Any", load_object(file)) for name, file in request.own_code.items()}
        subjects = {name: Subject(file) for name, file in request.own_code.items()}

        def plan(option: str, level: requests.Subject, check: Any, *given: Any) -> PlannedCheck:  # noqa: ANN401
            run = partial(check, subjects[option], own[option], *given)
            return PlannedCheck(level, subjects[option].name, run)

        if "collator" in own:
            yield plan("collator", "collator", check_padding, tokenizers, request.features)
        if "packing" in own:
            yield plan("packing", "packing", check_packing, tokenizers, request.features)
        if "sampler" in own:
            yield plan("sampler", "sampler", check_sampling)
        if "batch_sampler" in own:
            yield plan("batch_sampler", "batch-sampler", check_sampling, BATCH_SAMPLER_PLANS)
        if "accumulation" in own:
            yield plan("accumulation", "accumulation", check_accumulation)
        if "loader" in own:
            yield plan("loader", "workers", worker_seeds.check_loader)
        if "dataset" in own:
            loader = own.get("loader", loaders.torch_loader)
            yield plan("dataset", "workers", worker_seeds.check_dataset, loader)


def _identity(report: SubjectReport) -> SubjectReport:
    return report


def _library_checks() -> Iterator[PlannedCheck]:
    for planned in _found_in_libraries():
        subject, name, check = planned
        yield PlannedCheck(subject, name, check, is_own=False)


def _found_in_libraries() -> Iterator[tuple[requests.Subject, str, Callable[[], SubjectReport]]]:
    template = chat_templates.render_by_template
    for case, tokenizers in chat_templates.micro_tokenizers_by_case().items():
        subject = library_subject("transformers", f"apply_chat_template{case}")
        yield "chat", subject.name, partial(check_chat, subject, template, tokenizers)
        yield "labels", subject.name, partial(check_labels, subject, template, tokenizers)
    padding = [micro_tokenizer("own"), micro_tokenizer("eos")]
    for subject, collator, kind in collators.padding_collators():
        check = partial(check_padding, subject, collator, padding, kind)
        yield "collator", subject.name, check
    for subject, collator, kind in collators.packing_collators():
        check = partial(check_packing, subject, collator, padding, kind)
        yield "packing", subject.name, check
    for subject, open_run in samplers.library_samplers():
        yield "sampler", subject.name, partial(check_sampling, subject, open_run)
    if is_installed("accelerate"):
        subject = library_subject("transformers", "Trainer, resume_from_checkpoint")
        trainer = partial(
            check_sampling, subject, trainer_resume.TrainerRun, trainer_resume.TRAINER_PLANS
        )
        yield "sampler", subject.name, trainer
    for subject, step, steps in accumulation.library_accumulation():
        yield "accumulation", subject.name, partial(check_accumulation, subject, step, steps)
    for subject, loader in loaders.library_loaders():
        yield "workers", subject.name, partial(worker_seeds.check_loader, subject, loader)
    for subject, dataset in loaders.library_datasets():
        check = partial(worker_seeds.check_dataset, subject, dataset, loaders.torch_loader)
        yield "workers", subject.name, check
