"""Reader of the files that lm-eval writes with `--output_path DIR --log_samples`."""

import glob
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from assay.errors import UsageError
from assay.files import (
    UnreadableFileError,
    file_digest,
    read_json_lines,
    read_record,
    read_sealed,
    refuse_link,
    write_sealed,
)
from assay.runs.provenance import redact
from assay.verdicts import Record
from assay_bench.evaluations.choices import num_right, right_options, target_text
from assay_bench.evaluations.items import (
    LOG_PROBABILITY,
    Evaluation,
    Item,
    TaskResult,
    UnjudgedMetric,
)
from assay_bench.evaluations.metrics import ContradictionError, read_metrics

# Keys of a task's configuration that decide what the model is asked and how its answer is read.
_TASK_KEYS = (
    "doc_to_text", "doc_to_target", "doc_to_choice", "description", "target_delimiter",
    "fewshot_delimiter", "fewshot_split", "output_type", "generation_kwargs", "repeats", "filter_list",
    "gen_prefix", "process_results",
)  # fmt: skip
# Keys of the results that hold for all tasks.
_EVALUATION_KEYS = ("chat_template_sha", "system_instruction_sha")

_FACTS = ("lm_eval_version", "transformers_version", "date")

_NO_FILTER = "none"

_LIKELIHOOD_KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")

# Hexadecimal digits of SHA-256: 64 bits distinguish all items of a task.
_HASH_LENGTH = 16

# Lists the results of each task in the folder of `assay bench run`.
MANIFEST = "evaluation.json"

Sample = Mapping[str, Any]

_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def make_evaluation_error(place: Path | str, problem: object) -> UsageError:
    """Make the error for a folder or file."""
    return UsageError(f"{place}: {problem}")


class _Results(BaseModel):
    """The used fields of an lm-eval results_*.json."""

    model_config = ConfigDict(extra="allow")

    results: dict[str, dict[str, Any]]
    configs: dict[str, dict[str, Any]] = Field(min_length=1)
    versions: dict[str, Any] = Field(default_factory=dict)
    fewshot: dict[str, Any] = Field(default_factory=dict, alias="n-shot")
    directions: dict[str, dict[str, Any]] | None = Field(default=None, alias="higher_is_better")
    group_subtasks: dict[str, list[str]] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    model_name: str | None = None
    ours: dict[str, Any] = Field(default_factory=dict, alias="assay")
    """Fields that `assay bench run` adds."""


class Manifest(Record):
    """The file evaluation.json, which `assay bench run` writes."""

    results: dict[str, str] = Field(min_length=1)
    """The results_*.json of each task."""
    files: dict[str, str]
    """The digest of each file in the folder."""


def write_manifest(folder: Path, results: Mapping[str, Path]) -> None:
    """Write the manifest of the results below `folder` and of their sample files."""
    files = [file for result in results.values() for file in (result, *_sample_files(result))]
    write_sealed(
        folder / MANIFEST,
        Manifest(
            results={task: str(file.relative_to(folder)) for task, file in results.items()},
            files={str(file.relative_to(folder)): file_digest(file) for file in files},
        ),
    )


def _sample_files(results: Path) -> list[Path]:
    stamp = results.stem.removeprefix("results")
    return sorted(results.parent.glob(f"samples_*{glob.escape(stamp)}.jsonl"))


def read_evaluation(path: Path, clusters: Mapping[str, str] | None = None) -> Evaluation:
    """Read the newest evaluation in a folder, or the one in a results_*.json file.

    clusters: for each task, the document field that identifies the cluster.
    Raises: UsageError for no results or no samples; UnreadableFileError for files that cannot be
        read, were changed, or contradict each other.
    """
    if os.path.lexists(path / MANIFEST):  # True for a broken link too
        return _merged(path, read_sealed(Manifest, refuse_link(path / MANIFEST)), clusters)
    results_file = path if path.is_file() else newest_results(path)
    results = read_record(_Results, results_file)
    ours = results.ours
    kept = ours.get("clusters")
    clusters = {**(kept if isinstance(kept, dict) else {}), **(clusters or {})}
    stamp = results_file.stem.removeprefix("results")
    tasks: dict[str, TaskResult] = {}
    for name in results.configs:
        file = results_file.parent / f"samples_{name}{stamp}.jsonl"
        if Path(name).name != name or not file.is_file():
            raise make_evaluation_error(
                results_file, f"no samples of {name} ({file.name}): evaluate with --log_samples"
            )
        for result in _results_of_task(name, results, file, clusters.get(name)):
            tasks[result.name] = result
    extra = results.model_extra or {}
    return Evaluation(
        name=str(ours.get("name") or results.model_name or _model_of(results.config)),
        tasks=tasks,
        asked={key: extra.get(key) for key in _EVALUATION_KEYS},
        facts=ours | {key: extra[key] for key in _FACTS if key in extra},
        groups=_tasks_of_groups(results.group_subtasks, tasks),
    )


def _merged(folder: Path, manifest: Manifest, clusters: Mapping[str, str] | None) -> Evaluation:
    """Read a run that stores the results of each task in its own file."""
    for name, digest in manifest.files.items():
        if file_digest(_within(folder, name)) != digest:
            raise UnreadableFileError.of(folder / name, "it was changed after the run")
    parts = [read_evaluation(_within(folder, file), clusters) for file in manifest.results.values()]
    tasks = {name: task for part in parts for name, task in part.tasks.items()}
    groups = {name: members for part in parts for name, members in part.groups.items()}
    return replace(parts[0], tasks=tasks, groups=groups)


def _within(folder: Path, name: str) -> Path:
    file = folder / name
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
        raise UnreadableFileError.of(folder / MANIFEST, f"it names {name}, outside of its folder")
    return refuse_link(file)


def _model_of(config: Mapping[str, Any]) -> str:
    named = config.get("model_args") or config.get("model") or "a model without a name"
    return redact([str(named)])[0]


def newest_results(folder: Path) -> Path:
    """Find the newest results_*.json below a folder. Raises: UsageError if it is absent."""
    if not folder.is_dir():
        raise make_evaluation_error(folder, "no such file or folder")
    found = sorted(folder.rglob("results*.json"), key=lambda file: (file.stem, str(file)))
    if not found:
        raise make_evaluation_error(
            folder,
            "no results_*.json: expected output of `assay bench run` or lm-eval --output_path",
        )
    return found[-1]


def _results_of_task(
    name: str, results: _Results, file: Path, cluster: str | None
) -> Iterator[TaskResult]:
    """Yield a result for each filter of the task's answers."""
    by_filter: dict[str, list[Sample]] = {}
    for _, sample in read_json_lines(file):
        by_filter.setdefault(str(sample.get("filter", _NO_FILTER)), []).append(sample)
    if not by_filter:
        raise make_evaluation_error(file, "empty: the task has no documents")
    config = results.configs[name]
    asked = {key: config.get(key) for key in _TASK_KEYS}
    asked |= {"version": results.versions.get(name), "fewshot": results.fewshot.get(name)}
    for filter_, samples in by_filter.items():
        try:
            result = _result_of_filter(name, filter_, samples, results, cluster, file)
        except ContradictionError as error:
            metric, found, stated = error.args
            raise UnreadableFileError.of(
                file,
                f"its samples give {metric},{filter_} {found:.6g}, the results say {stated:.6g}",
            ) from None
        except _MALFORMED as error:
            raise make_evaluation_error(
                file, f"not samples of lm-eval: {type(error).__name__}: {error}"
            ) from None
        yield replace(
            result, asked=asked, name=name if len(by_filter) == 1 else f"{name} ({filter_})"
        )


def _result_of_filter(
    name: str,
    filter_: str,
    samples: Sequence[Sample],
    results: _Results,
    cluster: str | None,
    file: Path,
) -> TaskResult:
    config, directions = results.configs[name], results.directions
    kind = str(config.get("output_type"))
    requests = []
    for number, sample in enumerate(samples, 1):
        with _named(file, number):
            requests.append(_requests(sample, kind))
    likelihoods = [one.likelihoods for one in requests]
    stated = {
        key.removesuffix(f",{filter_}"): value
        for key, value in results.results.get(name, {}).items()
        if key.endswith(f",{filter_}") and isinstance(value, int | float)
    }
    scores, unjudged = read_metrics(
        samples,
        likelihoods,
        stated,
        config,
        None if directions is None else directions.get(name, {}),
    )
    metric = next((name for name, score in scores.items() if score.kind == "yes-no"), None)
    options: Sequence[int | None] | None = [0 if one else None for one in likelihoods]
    chance = None
    if kind == "multiple_choice":
        options = right_options(samples, [one.continuations for one in requests], likelihoods)
        pairs = zip(samples, likelihoods, strict=True)
        if metric is not None and metric.startswith("acc"):
            chance = sum(num_right(sample) / len(one) for sample, one in pairs) / len(samples)
    if options is None or (any(likelihoods) and None in options):
        reason = "the samples do not say which option is right"
        unjudged[LOG_PROBABILITY] = UnjudgedMetric(value=None, higher_is_better=True, reason=reason)
        options = [None] * len(samples)
    rights = scores[metric].values if metric is not None else [None] * len(samples)
    best = float(metric is not None and scores[metric].higher_is_better)
    seen: Counter[str] = Counter()
    items = []
    for number, (sample, request, option, right) in enumerate(
        zip(samples, requests, options, rights, strict=True), 1
    ):
        with _named(file, number):
            document = str(sample["doc_hash"])[:_HASH_LENGTH]
            seen[document] += 1
            again = f"#{seen[document]}" if seen[document] > 1 else ""
            items.append(
                Item(
                    key=document + again,
                    prompt_hash=str(sample["prompt_hash"])[:_HASH_LENGTH],
                    target_hash=str(sample["target_hash"])[:_HASH_LENGTH],
                    right=None if right is None else right == best,
                    cluster=None if cluster is None else str(sample["doc"][cluster]),
                    **_answers(sample, kind, request, option),
                )
            )
    return TaskResult(
        metric=metric,
        chance=chance,
        items=tuple(items),
        scores=scores,
        unjudged=unjudged,
        num_nan_calls=int(results.ours.get("num_nan_calls", 0)),
    )


@contextmanager
def _named(file: Path, number: int) -> Iterator[None]:
    """Raise UsageError with the number of a sample that lm-eval did not write."""
    try:
        yield
    except _MALFORMED as error:
        raise make_evaluation_error(
            file, f"sample {number} is not an lm-eval sample: {type(error).__name__}: {error}"
        ) from None


class _Requests(NamedTuple):
    """The requests of a sample, without those of options alone, which acc_mutual_info adds."""

    question: str
    continuations: list[str]
    likelihoods: list[float]
    """Empty for generated text."""


def _requests(sample: Sample, kind: str) -> _Requests:
    """Read arguments, which lm-eval's command line writes as objects, and responses, as text."""
    arguments = sample["arguments"]
    if isinstance(arguments, dict):
        arguments = [list(request.values()) for request in arguments.values()]
    responses = [responses[0] for responses in sample["resps"]]
    question = str(arguments[0][0])
    if kind not in _LIKELIHOOD_KINDS:
        return _Requests(question, [], [])
    if "acc_mutual_info" in sample["metrics"]:
        arguments = [request for request in arguments if request[0] != ""]
    continuations = [str(request[-1]) for request in arguments]
    likelihoods = [float(one[0] if isinstance(one, list) else one) for one in responses]
    return _Requests(question, continuations, likelihoods[: len(continuations)])


def _answers(sample: Sample, kind: str, request: _Requests, right: int | None) -> dict[str, Any]:
    """Return question, target, answer and log-probability per byte of the right option."""
    target, filtered = target_text(sample), sample["filtered_resps"]
    answer = str(filtered[0] if isinstance(filtered, list) else filtered)
    found: dict[str, Any] = {"question": request.question, "target": target, "answer": answer}
    if not request.likelihoods:
        return found
    if kind == "multiple_choice":
        texts = [text.strip() for text in request.continuations]
        found["answer"] = texts[int(np.argmax(request.likelihoods))]
        found["target"] = target if right is None else texts[right]
    elif kind == "loglikelihood":
        found["answer"] = target if str(sample["resps"][0][0][1]) == "True" else "(other text)"
    if right is not None:
        num_bytes = max(1, len(request.continuations[right].encode()))
        found["log_probability"] = request.likelihoods[right] / num_bytes
    if any(math.isnan(one) for one in request.likelihoods):
        found["log_probability"] = math.nan
    return found


def _tasks_of_groups(
    groups: Mapping[str, Sequence[str]], tasks: Mapping[str, TaskResult]
) -> dict[str, tuple[str, ...]]:
    """Name the tasks of each group, including those of its subgroups and of every filter."""
    found = {}
    for group in groups:
        inside, remaining = {group}, [group]
        while remaining:
            children = [str(one) for one in groups.get(remaining.pop(), ()) if one not in inside]
            inside.update(children)
            remaining += children
        found[group] = tuple(task for task in tasks if task.partition(" (")[0] in inside)
    return {name: members for name, members in found.items() if len(members) > 1}
