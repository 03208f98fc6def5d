"""Reader of the files that lm-eval writes with `--output_path DIR --log_samples`."""

import glob
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from assay_bench.evaluations.items import Evaluation, Item, TaskResult

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
    )


def _merged(folder: Path, manifest: Manifest, clusters: Mapping[str, str] | None) -> Evaluation:
    """Read a run that stores the results of each task in its own file."""
    for name, digest in manifest.files.items():
        if file_digest(_within(folder, name)) != digest:
            raise UnreadableFileError.of(folder / name, "it was changed after the run")
    parts = [read_evaluation(_within(folder, file), clusters) for file in manifest.results.values()]
    tasks = {name: task for part in parts for name, task in part.tasks.items()}
    return replace(parts[0], tasks=tasks)


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
        metric = _metric_of(samples, file)
        result = TaskResult(
            name=name if len(by_filter) == 1 else f"{name} ({filter_})",
            metric=metric,
            chance=_chance(samples, str(config.get("output_type")), file),
            items=tuple(_items(samples, str(config.get("output_type")), metric, cluster, file)),
            asked=asked,
        )
        _require_agreement(result, results.results.get(name, {}), f"{metric},{filter_}", file)
        yield result


# Allowed rounding error of a mean.
_EQUAL = 1e-9


def _require_agreement(
    result: TaskResult, aggregated: Mapping[str, Any], key: str, file: Path
) -> None:
    """Check the accuracy that lm-eval wrote against the mean over the samples.

    Raises: UnreadableFileError if the two differ.
    """
    stated = aggregated.get(key)
    if result.accuracy is None or not isinstance(stated, int | float):
        return
    if not math.isclose(result.accuracy, stated, rel_tol=_EQUAL, abs_tol=_EQUAL):
        raise UnreadableFileError.of(
            file, f"its samples give {key} {result.accuracy:.6g}, the results say {stated:.6g}"
        )


def _metric_of(samples: list[Sample], file: Path) -> str | None:
    """Return the first metric that is yes or no for every item."""
    metrics = samples[0].get("metrics", [])
    if not isinstance(metrics, list):
        raise make_evaluation_error(
            file, "sample 1 is not an lm-eval sample: metrics is not a list"
        )
    for metric in map(str, metrics):
        if all(_truth(sample.get(metric)) is not None for sample in samples):
            return metric
    return None


def _chance(samples: Sequence[Sample], kind: str, file: Path) -> float | None:
    """Return the accuracy of a guess; None unless the task is multiple choice."""
    if kind != "multiple_choice":
        return None
    try:
        return sum(1 / len(sample["arguments"]) for sample in samples) / len(samples)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise make_evaluation_error(
            file, f"not an lm-eval sample: {type(error).__name__}: {error}"
        ) from None


def _items(
    samples: Iterable[Sample], kind: str, metric: str | None, cluster: str | None, file: Path
) -> Iterator[Item]:
    seen: Counter[str] = Counter()
    for number, sample in enumerate(samples, 1):
        try:
            document = str(sample["doc_hash"])[:_HASH_LENGTH]
            seen[document] += 1
            again = f"#{seen[document]}" if seen[document] > 1 else ""
            yield Item(
                key=document + again,
                prompt_hash=str(sample["prompt_hash"])[:_HASH_LENGTH],
                target_hash=str(sample["target_hash"])[:_HASH_LENGTH],
                right=None if metric is None else _truth(sample[metric]),
                cluster=None if cluster is None else str(sample["doc"][cluster]),
                **_answers(sample, kind),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise make_evaluation_error(
                file, f"sample {number} is not an lm-eval sample: {type(error).__name__}: {error}"
            ) from None


def _truth(value: object) -> bool | None:
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _answers(sample: Sample, kind: str) -> dict[str, Any]:
    """Read question, target, answer and log-probability per byte from the requests of a sample.

    There is one request for each continuation, or one of another kind. lm-eval's command line writes
    arguments as objects, and numbers as text.
    kind: `output_type` of the task.
    """
    arguments, target, filtered = sample["arguments"], sample["target"], sample["filtered_resps"]
    if isinstance(arguments, dict):
        arguments = [list(request.values()) for request in arguments.values()]
    responses = [responses[0] for responses in sample["resps"]]
    question = str(arguments[0][0])
    target = str(target[0] if isinstance(target, list) else target)
    if kind not in _LIKELIHOOD_KINDS:
        answer = str(filtered[0] if isinstance(filtered, list) else filtered)
        return {"question": question, "target": target, "answer": answer}
    continuations = [str(request[-1]) for request in arguments]
    likelihoods = [float(one[0] if isinstance(one, list) else one) for one in responses]
    right = _target_index(continuations, target)
    num_bytes = max(1, len(continuations[right].encode()))
    answer = ""
    if kind == "multiple_choice":
        best = max(range(len(continuations)), key=likelihoods.__getitem__)
        target, answer = continuations[right].strip(), continuations[best].strip()
    elif kind == "loglikelihood":
        answer = target if str(responses[0][1]) == "True" else "(other text)"
    return {
        "question": question,
        "target": target,
        "answer": answer,
        "log_probability": likelihoods[right] / num_bytes,
    }


def _target_index(continuations: Sequence[str], target: str) -> int:
    """Return the index of the right continuation. Raises: ValueError if there is none."""
    if len(continuations) == 1:
        return 0
    if target.isdecimal() and int(target) < len(continuations):
        return int(target)
    return [text.strip() for text in continuations].index(target.strip())
