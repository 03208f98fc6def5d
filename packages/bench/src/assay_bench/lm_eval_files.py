"""Reader of the files that lm-eval writes with `--output_path DIR --log_samples`. Imports no lm-eval."""

import glob
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from assay.errors import UsageError, name_some
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
from assay_bench.comparing import NUMERICS, SuiteTerms
from assay_bench.lm_eval_metrics import ContradictionError, arguments_of, read_metrics
from assay_bench.performance.records import RESULT_FILE as PERFORMANCE_FILE
from assay_bench.results import (
    LOG_PROBABILITY,
    Evaluation,
    Item,
    TaskResult,
    UnjudgedMetric,
    mean_of_known,
    plain_name,
)
from assay_bench.right_options import (
    Choice,
    Options,
    Sample,
    describe_repeated_choices,
    find_wrong_labels,
    right_options,
    target_text,
)

# Keys of a task's configuration that decide what the model is asked and how its answer is read.
_TASK_KEYS = (
    "doc_to_text", "doc_to_target", "doc_to_choice", "description", "target_delimiter",
    "fewshot_delimiter", "fewshot_split", "output_type", "generation_kwargs", "repeats", "filter_list",
    "gen_prefix", "process_results",
)  # fmt: skip
# Keys of the results that hold for all tasks.
_EVALUATION_KEYS = ("chat_template_sha", "system_instruction_sha")

_FACTS = ("lm_eval_version", "transformers_version", "date")
# Settings that may change answers, also of lm-eval's classes hf and vllm. Of paths, the last part is kept.
_SETTINGS = (
    *NUMERICS, *_FACTS[:2], "max_length", "max_model_len", "truncation", "add_bos_token", "max_gen_toks", "device",
    "tokenizer", "revision", "attn_implementation", "use_cache",
)  # fmt: skip

_NO_FILTER = "none"

_LIKELIHOOD_KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")

# Hexadecimal digits of SHA-256: 64 bits distinguish all items of a task.
_HASH_LENGTH = 16

# Field that `assay bench run` adds to samples: `Item.guess` of the whole answer, in nats.
GUESS = "assay_guess"

# Lists the results of each task in the folder of `assay bench run`.
MANIFEST = "evaluation.json"

_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError)


class _Results(BaseModel):
    """The used fields of an lm-eval results_*.json."""

    model_config = ConfigDict(extra="allow")

    results: dict[str, dict[str, Any]]
    configs: dict[str, dict[str, Any]] = Field(min_length=1)
    versions: dict[str, Any] = Field(default_factory=dict)
    fewshot: dict[str, Any] = Field(default_factory=dict, alias="n-shot")
    num_samples: dict[str, dict[str, int]] = Field(default_factory=dict, alias="n-samples")
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
    suite: SuiteTerms | None = None
    """The suite of the run; None for single tasks."""


def write_manifest(
    folder: Path, results: Mapping[str, Path], suite: SuiteTerms | None = None
) -> None:
    """Write the manifest of the results below `folder` and of their sample files."""
    files = [file for result in results.values() for file in (result, *_sample_files(result))]
    write_sealed(
        folder / MANIFEST,
        Manifest(
            results={task: str(file.relative_to(folder)) for task, file in results.items()},
            files={str(file.relative_to(folder)): file_digest(file) for file in files},
            suite=suite,
        ),
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in `folder`. Raises: UnreadableFileError."""
    return read_sealed(Manifest, refuse_link(folder / MANIFEST))


def _sample_files(results: Path) -> list[Path]:
    stamp = results.stem.removeprefix("results")
    return sorted(results.parent.glob(f"samples_*{glob.escape(stamp)}.jsonl"))


def read_evaluation(path: Path, clusters: Mapping[str, str] | None = None) -> Evaluation:
    """Read the newest evaluation in a folder, or the one in a results_*.json file.

    clusters: for each task, the document field that identifies the cluster.
    Raises: UsageError for no results, no samples, or results of several models; UnreadableFileError for files that
        cannot be read, were changed, or contradict each other.
    """
    if os.path.lexists(path / MANIFEST):  # True for a broken link too
        return _merged(path, read_manifest(path), clusters)
    if path.is_file() and path.suffix == ".jsonl":
        raise UsageError(f"{path}: samples alone are not results: name the folder {path.parent}")
    files = [path] if path.is_file() else find_results(path)
    read = {file: read_record(_Results, file) for file in files}
    _require_one_model(path, read)
    *older, (results_file, results) = read.items()
    ours = results.ours
    kept = ours.get("clusters")
    clusters = {**(kept if isinstance(kept, dict) else {}), **(clusters or {})}
    stamp = results_file.stem.removeprefix("results")
    tasks: dict[str, TaskResult] = {}
    for name in results.configs:
        file = results_file.parent / f"samples_{name}{stamp}.jsonl"
        if Path(name).name != name or not file.is_file():
            raise UsageError(
                f"{results_file}: no samples of {name} ({file.name}): evaluate with --log_samples"
            )
        for result in _results_of_task(name, results, file, clusters.get(name)):
            tasks[result.name] = result
    ignored = f"{path}: {results_file.name} was read, older results were ignored: {name_some([one.name for one, _ in older])}"
    extra = results.model_extra or {}
    facts = dict(ours or _side_of(results))
    config = results.config
    given = config.get("model_args")
    known = config | extra | (given if isinstance(given, dict) else {}) | facts
    if seeds := {key: config[key] for key in config if key.endswith("_seed")}:
        facts["seeds"] = seeds
    return Evaluation(
        name=str(ours.get("name") or " on ".join(_side_of(results).values())),
        tasks=tasks,
        asked={key: extra.get(key) for key in _EVALUATION_KEYS},
        facts=facts | {key: extra[key] for key in _FACTS if key in extra},
        groups=_tasks_of_groups(results.group_subtasks, tasks),
        notes=(ignored,) if older else (),
        settings={
            key: Path(one).name if isinstance(one, str) else one
            for key in _SETTINGS
            if (one := known.get(key)) not in (None, "", False, "auto")
        },
    )


def _require_one_model(folder: Path, read: Mapping[Path, _Results]) -> None:
    """Raise UsageError for results in several folders, as lm-eval writes them for several models, or of several names."""
    places = dict.fromkeys(str(file.parent) for file in read)
    if len(places) == 1:
        newest = {str(one.model_name): str(file) for file, one in read.items()}
        places = dict.fromkeys(newest.values())
    if len(places) > 1:
        raise UsageError(
            f"{folder}: it holds results of several models or folders; name one of: {', '.join(sorted(places))}"
        )


def _merged(folder: Path, manifest: Manifest, clusters: Mapping[str, str] | None) -> Evaluation:
    """Read a run that stores the results of each task in its own file."""
    for name, digest in manifest.files.items():
        if file_digest(_within(folder, name)) != digest:
            raise UnreadableFileError.of(folder / name, "it was changed after the run")
    clusters = {**(manifest.suite.clusters if manifest.suite else {}), **(clusters or {})}
    parts = [read_evaluation(_within(folder, file), clusters) for file in manifest.results.values()]
    tasks = {name: task for part in parts for name, task in part.tasks.items()}
    groups = {name: members for part in parts for name, members in part.groups.items()}
    facts = dict(parts[0].facts)
    if manifest.suite is not None:
        facts["suite"] = manifest.suite.model_dump(mode="json")
    return replace(parts[0], tasks=tasks, groups=groups, facts=facts)


def _within(folder: Path, name: str) -> Path:
    file = folder / name
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
        raise UnreadableFileError.of(folder / MANIFEST, f"it names {name}, outside of its folder")
    return refuse_link(file)


def _side_of(results: _Results) -> dict[str, Any]:
    """Return the model, and the class and dtype that lm-eval ran it with, as far as its results say so."""
    config = results.config
    arguments, kind = config.get("model_args"), config.get("model")
    named = str(results.model_name or arguments or kind or "a model without a name")
    model = Path(named).name if "=" not in named and Path(named).is_absolute() else named
    given = arguments.get("dtype") if isinstance(arguments, dict) else None
    dtype = str(config.get("model_dtype") or given or "").removeprefix("torch.")
    run = "/".join(str(one) for one in (kind, dtype) if one)
    return {"model": redact([model])[0]} | ({"run": run} if run else {})


def find_results(folder: Path) -> list[Path]:
    """Find every results_*.json below a folder, the newest last. Raises: UsageError without any."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such file or folder")
    found = sorted(folder.rglob("results*.json"), key=lambda file: (file.stem, str(file)))
    if not found and any(folder.rglob(PERFORMANCE_FILE)):
        raise UsageError(f"{folder}: results of `perf`: compare them with `assay bench ab`")
    if not found:
        raise UsageError(
            f"{folder}: no results_*.json: expected output of `assay bench run` or lm-eval --output_path"
        )
    return found


def _results_of_task(
    name: str, results: _Results, file: Path, cluster: str | None
) -> Iterator[TaskResult]:
    """Yield a result for each filter of the task's answers."""
    by_filter: dict[str, list[Sample]] = {}
    for line, sample in read_json_lines(file):
        named = sample.get("metrics")
        if isinstance(named, list) and (lost := [one for one in named if one not in sample]):
            place = f"line {line} (doc_id {sample.get('doc_id')})"
            raise UnreadableFileError.of(file, f"{place} has no {', '.join(map(str, lost))}")
        by_filter.setdefault(str(sample.get("filter", _NO_FILTER)), []).append(sample)
    if not by_filter:
        raise UsageError(f"{file}: empty: the task has no documents")
    config = results.configs[name]
    asked = {key: config.get(key) for key in _TASK_KEYS}
    asked |= {"version": results.versions.get(name), "fewshot": results.fewshot.get(name)}
    for filter_, samples in by_filter.items():
        try:
            if problem := _count_problem(samples, results.num_samples.get(name, {})):
                raise UnreadableFileError.of(file, problem.format(filter_))
            result = _result_of_filter(name, filter_, samples, results, cluster, file)
        except ContradictionError as error:
            metric, found, stated = error.args
            raise UnreadableFileError.of(
                file,
                f"its samples give {metric},{filter_} {found:.6g}, the results say {stated:.6g}",
            ) from None
        except _MALFORMED as error:
            raise _make_sample_error(f"{file}: task {name}", error) from None
        steps = asked["filter_list"]
        if isinstance(steps, list):  # other filters are other tasks
            steps = [one for one in steps if isinstance(one, dict) and one.get("name") == filter_]
        yield replace(
            result,
            asked=asked | {"filter_list": steps},
            name=name if filter_ == _NO_FILTER else f"{name} ({filter_})",
        )


def _count_problem(samples: Sequence[Sample], stated: Mapping[str, int]) -> str:
    """Describe documents with several lines, or another number of lines than stated, of the filter {}; "" without any."""
    seen = Counter(sample.get("doc_id") for sample in samples)
    if repeated := [one for one, num in seen.items() if num > 1 and one is not None]:
        num = sum(seen[one] - 1 for one in repeated)
        return (
            f"{num} of {len(samples)} lines of filter {{}} repeat a doc_id, first {repeated[0]}:"
            " lm-eval writes one line for each document"
        )
    # lm-eval 0.4.13 counts the values of the metric that applies to the most documents.
    of_metrics = Counter(metric for sample in samples for metric in sample["metrics"])
    num_values = max(of_metrics.values(), default=0)
    if stated.get("effective", len(samples)) not in (len(samples), num_values):
        return f"{len(samples)} documents of filter {{}}, the results say {stated['effective']}"
    return ""


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
    groups = _group_repeats(samples, requests)
    scores, unjudged = read_metrics(
        samples,
        likelihoods,
        stated,
        config,
        None if directions is None else directions.get(name, {}),
    )
    scores = {name: score.over(groups) for name, score in scores.items()}
    metric = next((name for name, score in scores.items() if score.kind == "yes-no"), None)
    rights: Sequence[Options | None] = [frozenset({0} if one else ()) for one in likelihoods]
    chance, problem, remarks = None, "", []
    if kind == "multiple_choice":
        choices = [
            Choice(sample, sample.get("doc_id", place), one.continuations, one.likelihoods)
            for place, (sample, one) in enumerate(zip(samples, requests, strict=True))
        ]
        rights, contradiction = right_options(choices, str(config.get("target_delimiter", " ")))
        if not config.get("process_results"):
            problem = contradiction or find_wrong_labels(choices, rights)
        remarks = [repeated] if (repeated := describe_repeated_choices(choices)) else []
        if metric is not None and metric.startswith("acc"):
            chance = fmean(
                max(1, len(rights[one] or ())) / len(likelihoods[one]) for one, *_ in groups
            )
    options = [next(iter(one)) if one and len(one) == 1 else None for one in rights]
    if any(likelihoods) and None in options:
        reason = "the samples do not say which option is right"
        unjudged[LOG_PROBABILITY] = UnjudgedMetric(value=None, higher_is_better=True, reason=reason)
        options = [None] * len(samples)
    items = [
        Item(
            key=str(sample["doc_hash"])[:_HASH_LENGTH],
            prompt_hash=str(sample["prompt_hash"])[:_HASH_LENGTH],
            target_hash=str(sample["target_hash"])[:_HASH_LENGTH],
            cluster=None if cluster is None else _cluster_of(sample, cluster, name, number),
            **_answers(sample, kind, request, option),
        )
        for number, (sample, request, option) in enumerate(
            zip(samples, requests, options, strict=True), 1
        )
    ]
    answers = scores[metric].values if metric is not None else [None] * len(groups)
    best = float(metric is not None and scores[metric].higher_is_better)
    num_repeats = len(samples) - len(groups)
    num_documents = results.num_samples.get(name, {}).get("original")
    return TaskResult(
        metric=metric,
        chance=chance,
        items=tuple(
            replace(
                items[group[0]],
                right=None if right is None else right == best,
                stored=items[group[0]].stored if len(group) == 1 else {},
                log_probability=mean_of_known(items[one].log_probability for one in group),
            )
            for group, right in zip(groups, answers, strict=True)
        ),
        scores=scores,
        unjudged=unjudged,
        num_documents=None if num_documents is None else num_documents - num_repeats,
        num_repeats=num_repeats,
        num_nan_calls=results.ours["num_nan_calls"] if results.ours else 0,
        nan_weights=tuple(results.ours.get("nan_weights", ())),
        problem=problem,
        notes=tuple(remarks),
    )


def _group_repeats(samples: Sequence[Sample], requests: Sequence["_Requests"]) -> list[list[int]]:
    """Group the places of samples with an equal document or equal requests: their answers are not independent.

    Each group starts with its lowest document hash, whatever the order of the documents.
    """
    num = len(samples)
    names = [str(sample["doc_hash"]) for sample in samples], [str(one.asked) for one in requests]
    documents, asked = (np.unique(one, return_inverse=True)[1] for one in names)
    links = coo_array((np.ones(num), (documents, num + asked)), shape=(2 * num, 2 * num))
    _, group_of = connected_components(links, directed=False)
    groups: dict[int, list[int]] = {}
    for place, document in enumerate(documents):
        groups.setdefault(group_of[document], []).append(place)
    return [sorted(group, key=lambda place: names[0][place]) for group in groups.values()]


def _cluster_of(sample: Sample, field: str, task: str, number: int) -> str:
    document = sample["doc"]
    if field not in document:
        raise UsageError(
            f"cluster {task}={field}: document {number} has no field {field}, only {', '.join(document)}"
        )
    return str(document[field])


@contextmanager
def _named(file: Path, number: int) -> Iterator[None]:
    """Raise UsageError with the number of a sample that lm-eval did not write."""
    try:
        yield
    except _MALFORMED as error:
        raise _make_sample_error(f"{file}: sample {number}", error) from None


def _make_sample_error(place: str, error: Exception) -> UsageError:
    is_missing = isinstance(error, KeyError)
    problem = f"{error} is missing" if is_missing else f"a value has an unknown form ({error})"
    return UsageError(f"{place} is not as lm-eval writes it: {problem}")


class _Requests(NamedTuple):
    """The requests of a sample, without those of options alone, which acc_mutual_info adds."""

    question: str
    asked: list[str]
    """The prompt's hash and every request, in an order that does not depend on that of the options."""
    continuations: list[str]
    likelihoods: list[float]
    """Empty for generated text."""


def _requests(sample: Sample, kind: str) -> _Requests:
    """Read arguments, and responses, which lm-eval's command line writes as text."""
    arguments = arguments_of(sample)
    asked = [str(sample["prompt_hash"]), *sorted(map(str, arguments))]
    responses = [responses[0] for responses in sample["resps"]]
    question = str(arguments[0][0])
    if kind not in _LIKELIHOOD_KINDS:
        return _Requests(question, asked, [], [])
    if "acc_mutual_info" in sample["metrics"]:
        arguments = [request for request in arguments if request[0] != ""]
    # Images and sounds come after the continuation.
    continuations = [str(request[:2][-1]) for request in arguments]
    likelihoods = [float(one[0] if isinstance(one, list) else one) for one in responses]
    return _Requests(question, asked, continuations, likelihoods[: len(continuations)])


def _answers(sample: Sample, kind: str, request: _Requests, right: int | None) -> dict[str, Any]:
    """Return question, target, answer and log-probability per byte of the right option."""
    target, filtered = target_text(sample), sample["filtered_resps"]
    answer = str(filtered[0] if isinstance(filtered, list) and len(filtered) == 1 else filtered)
    found: dict[str, Any] = {"question": request.question, "target": target, "answer": answer}
    if kind not in ("multiple_choice", "loglikelihood"):
        found["stored"] = {  # libraries may round the last digits of a number in other ways
            name: f"{one:.6g}" if isinstance(one := sample[name], float) else str(one)
            for name in sample["metrics"]
        }
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
        if GUESS in sample:
            found["guess"] = float(sample[GUESS]) / num_bytes
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
        found[group] = tuple(task for task in tasks if plain_name(task) in inside)
    # lm-eval also lists plain tasks, without children.
    return {name: members for name, members in found.items() if groups[name] and len(members) > 1}
