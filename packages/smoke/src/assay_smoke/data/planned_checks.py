"""The checks of a request, and the process that runs them."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from assay.errors import UsageError
from assay.files import read_json_object
from assay.models.config_files import load_config, load_tokenizer
from assay.models.inspect.inspection import check_tokenizer
from assay.models.sources import RemoteCode, fetch_config, resolve_model
from assay.plugins import load_object
from assay.runs import Progress
from assay_smoke.data import libraries, protocols, worker_seeds
from assay_smoke.data.accumulation import check_accumulation
from assay_smoke.data.chats import check_chat, check_labels
from assay_smoke.data.collating import check_packing, check_padding
from assay_smoke.data.properties import (
    LEVELS,
    DataLevel,
    Fault,
    PlannedCheck,
    PropertyLog,
    RaisedError,
    Subject,
    SubjectReport,
)
from assay_smoke.data.protocols import Tokenizer
from assay_smoke.data.sampling import BATCH_SAMPLER_PLANS, check_sampling
from assay_smoke.data.verdict import (
    NOT_ASKED_FOR,
    CheckReport,
    DataAnswer,
    DataRequest,
)

ONE_BOS = "a text begins with one BOS, and a chat is tokenized once"


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A model's tokenizer."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end generation; empty if no file declares them."""
    report: SubjectReport | None = None
    """Findings of core's level `load`."""


def open_tokenizer(model: str, remote_code: RemoteCode) -> ModelTokenizer:
    """Load the tokenizer of a model or of a folder without a model.

    Raises: UsageError if there is none.
    """
    folder, config = Path(model).expanduser(), None
    if not folder.is_dir() or (folder / "config.json").is_file():
        source = resolve_model(model)
        if source.kind == "micro":
            raise UsageError(
                f"{model} has no tokenizer: name a folder with one, or no MODEL for generated ones"
            )
        folder = source.folder or _download_tokenizer(source.reference)
        config = load_config(folder, remote_code)
    tokenizer = load_tokenizer(folder, remote_code)
    if config is None:  # one whose vocabulary fits the tokenizer
        from transformers import PretrainedConfig

        config = PretrainedConfig()
        config.vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1
    eos_token_ids = _eos_ids(folder)
    wrong, notes = check_tokenizer(tokenizer, config, eos_token_ids)
    log = PropertyLog(f"the tokenizer of {model}", (ONE_BOS,))
    log.judge([ONE_BOS], [Fault(ONE_BOS, "; ".join(wrong))] if wrong else [])
    for note in notes:
        log.note(note)
    return ModelTokenizer(tokenizer, eos_token_ids, log.report())


def _download_tokenizer(reference: str) -> Path:
    from huggingface_hub import snapshot_download

    fetch_config(reference)  # raises a clear error for a wrong name or an absent hub
    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(reference, allow_patterns=patterns, ignore_patterns=["*/*"]))


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """Read the ids that end generation from generation_config.json, or else from config.json."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        ids = read_json_object(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def run_checks(request: DataRequest, progress: Progress) -> DataAnswer:
    """Run every check that the request asks for, in a process of its own."""
    # Workers of data loaders are forked, since a new interpreter cannot import users' files.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # more threads are slower on models of this size
    plan = ChecksPlan(request)
    reports = []
    checks = plan.checks()
    with progress.task("checks properties", len(checks)) as task:
        for check in checks:
            with progress.step(f"{check.level}: {check.name}"):
                try:
                    found = CheckReport(level=check.level, report=check.run())
                except RaisedError as error:
                    if check.is_own:
                        raise
                    nothing = SubjectReport(subject=check.name, cases={})
                    found = CheckReport(level=check.level, report=nothing, problem=str(error))
            reports.append(found)
            task.advance()
    return DataAnswer(checks=reports, left_out=plan.left_out, notes=plan.notes)


@dataclass
class ChecksPlan:
    """The checks of a request, and the reasons why levels have none."""

    request: DataRequest
    left_out: dict[DataLevel, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def model(self) -> ModelTokenizer | None:
        """Open the tokenizer of MODEL, if there is one."""
        name = self.request.model
        return None if name is None else open_tokenizer(name, self.request.remote_code)

    def checks(self) -> list[PlannedCheck]:
        """Return all checks in the order of the levels, and fill `left_out` and `notes`."""
        if self.request.model is None and not self.request.own_code:
            found = [*libraries.library_checks()]
            self.notes += libraries.absent_libraries()
        else:
            found = [*self._chat_checks(), *self._own_checks()]
        planned = {check.level for check in found}
        absent = [level for level in LEVELS if level not in planned]
        self.left_out = dict.fromkeys(absent, NOT_ASKED_FOR) | self.left_out
        return sorted(found, key=lambda check: LEVELS.index(check.level))

    def _chat_checks(self) -> Iterator[PlannedCheck]:
        request, model = self.request, self.model
        if model is not None and (report := model.report) is not None:
            yield PlannedCheck("chat", report.subject, lambda: report)
        labelled = True
        if (code := request.own_code.get("render")) is not None:
            subject = Subject(code)
            render = cast("protocols.Render", load_object(code))
        elif model is None:
            return
        elif not model.tokenizer.chat_template:
            why = "the tokenizer has no chat template: give --render"
            self.left_out |= {"chat": why, "labels": why}
            return
        else:
            subject = Subject(f"chat template of {request.model}")
            render = libraries.render_by_template
            labelled = libraries.marks_assistant(model.tokenizer)
        tokenizers = [model.tokenizer] if model else libraries.micro_tokenizers()
        eos = model.eos_token_ids if model else ()
        chat = partial(check_chat, subject, render, tokenizers, eos, request.truncation)
        yield PlannedCheck("chat", subject.name, chat)
        if labelled:
            labels = partial(check_labels, subject, render, tokenizers)
            yield PlannedCheck("labels", subject.name, labels)
        else:
            self.left_out["labels"] = (
                "the chat template has no {% generation %} marks, so transformers cannot tell the"
                " assistant's tokens: give --render"
            )

    def _own_checks(self) -> Iterator[PlannedCheck]:
        own = {name: cast("Any", load_object(file)) for name, file in self.request.own_code.items()}
        tokenizers = [self.model.tokenizer] if self.model else libraries.padding_tokenizers()
        features = self.request.features
        loader = own.get("loader", libraries.torch_loader)
        planned: list[tuple[str, DataLevel, Any, tuple[Any, ...]]] = [
            ("collator", "collator", check_padding, (tokenizers, features)),
            ("packing", "packing", check_packing, (tokenizers, features)),
            ("sampler", "sampler", check_sampling, ()),
            ("batch_sampler", "batch-sampler", check_sampling, (BATCH_SAMPLER_PLANS,)),
            ("accumulation", "accumulation", check_accumulation, ()),
            ("loader", "workers", worker_seeds.check_loader, ()),
            ("dataset", "workers", worker_seeds.check_dataset, (loader,)),
        ]
        for option, level, check, arguments in planned:
            if option in own:
                name = self.request.own_code[option]
                yield PlannedCheck(
                    level, name, partial(check, Subject(name), own[option], *arguments)
                )
