"""Writes result folders of lm-eval: small local tasks of every kind, answered by a made-up model.

`python packages/bench/tests/lm_eval_folders.py FOLDER` writes FOLDER/base and FOLDER/worse. The worse
model damages the answers to every third document.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker

NUM_DOCUMENTS = 90
_WORDS = [
    "the",
    "old",
    "house",
    "on",
    "the",
    "green",
    "hill",
    "was",
    "sold",
    "to",
    "a",
    "young",
    "man",
    "from",
    "the",
    "city",
    "last",
    "year",
]


def _documents() -> list[dict[str, Any]]:
    documents = []
    for number in range(NUM_DOCUMENTS):
        options = [f"{(number + step) % 8}" for step in range(0, 8, 2)]
        label = number % 4
        words = _WORDS[number % 7 :] + _WORDS[: number % 7]
        documents.append(
            {
                "number": number,
                "question": f"question {number}",
                "options": options,
                "long_options": [option * (1 + place) for place, option in enumerate(options)],
                "label": label,
                "yes": number % 2,
                "labels": [label, (label + 1) % 4],
                "answer": options[label],
                "sentence": " ".join([*words, str(number)]),
            }
        )
    return documents


def _metrics(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name} for name in names]


def _contexts(document: Mapping[str, Any]) -> list[str]:
    return [f"{document['question']}: the cat", f"{document['question']}: the dog"]


def _second_or_first(document: Mapping[str, Any]) -> int:
    return int(document["yes"])


def _scores(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """Return metrics as tasks with their own code do: rates, lists, optional ones, other forms."""
    damaged = "damaged" in results[0]
    return {
        "refusal_rate": float(damaged or document["number"] % 10 == 0),
        "overlap": 0.25 if damaged else 0.5 + document["number"] % 3 / 4,
        "instructions": [not damaged, document["number"] % 2 == 0],
        "hard_acc": float(not damaged) if document["number"] % 3 else float("nan"),
        "longest": 1.0 if damaged else 2.0,
    }


def _flat_mean(values: Sequence[Sequence[bool]]) -> float:
    flat = [one for value in values for one in value]
    return sum(flat) / len(flat)


_Task = dict[str, Any]
_CHOICE: _Task = {
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": "options",
    "doc_to_target": "label",
}
_TEXT: _Task = {
    "output_type": "generate_until",
    "doc_to_text": "question",
    "doc_to_target": "sentence",
    "generation_kwargs": {"until": ["\n"], "do_sample": False},
}
_NUMBER: _Task = {
    "function": "regex", "regex_pattern": r"(\d+)", "group_select": 0, "fallback": "none"
}  # fmt: skip
TASKS: dict[str, _Task] = {
    "choices": _CHOICE
    | {"doc_to_choice": "long_options"}
    | {"metric_list": _metrics("acc", "acc_norm", "acc_bytes", "exact_match", "mcc", "brier_score")},
    "information": _CHOICE | {"metric_list": _metrics("acc", "acc_mutual_info")},
    "numerals": _CHOICE | {"doc_to_target": "answer", "metric_list": _metrics("acc")},
    "several": _CHOICE | {"doc_to_target": "labels", "metric_list": _metrics("acc")},
    "pairs": _CHOICE
    | {"doc_to_choice": ["no", "yes"], "doc_to_target": "yes"}
    | {"metric_list": _metrics("acc", "f1", "mcc")},
    "contexts": _CHOICE
    | {"doc_to_text": _second_or_first, "doc_to_choice": _contexts, "doc_to_target": "sentence"}
    | {"metric_list": _metrics("acc")},
    "endings": {
        "output_type": "loglikelihood",
        "doc_to_text": "question",
        "doc_to_target": "sentence",
        "metric_list": _metrics("acc", "perplexity"),
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "sentence",
        "metric_list": _metrics("word_perplexity", "byte_perplexity", "bits_per_byte"),
    },
    "translations": _TEXT | {"metric_list": _metrics("bleu", "chrf", "chrf++", "ter")},
    "sums": _TEXT
    | {"doc_to_target": "{{number}}", "repeats": 3, "metric_list": _metrics("exact_match")}
    | {
        "filter_list": [
            {"name": "first", "filter": [_NUMBER, {"function": "take_first"}]},
            {"name": "vote", "filter": [_NUMBER, {"function": "majority_vote"}, {"function": "take_first"}]},
        ]
    },
    "own": _TEXT
    | {"process_results": _scores}
    | {
        "metric_list": [
            {"metric": "refusal_rate", "aggregation": "mean", "higher_is_better": False},
            {"metric": "overlap", "aggregation": "mean", "higher_is_better": True},
            {"metric": "instructions", "aggregation": _flat_mean, "higher_is_better": True},
            {"metric": "hard_acc", "aggregation": "nanmean", "higher_is_better": True},
            {"metric": "longest", "aggregation": max, "higher_is_better": True},
        ]
    },
}  # fmt: skip


class MadeUpModel(LM):  # type: ignore[misc]
    """A model whose answers follow from the document."""

    def __init__(self, is_damaged: Callable[[int], bool]) -> None:
        super().__init__()
        self._is_damaged = is_damaged

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [self._likelihood(one) for one in requests]

    def _likelihood(self, request: Instance) -> tuple[float, bool]:
        document, (context, continuation) = request.doc, request.args
        if not context:  # acc_mutual_info: the same for every option
            return -2.0, False
        right = {
            "contexts": context == _contexts(document)[document["yes"]],
            "pairs": continuation.strip() == ["no", "yes"][document["yes"]],
            "endings": True,
        }.get(str(request.task_name), continuation.strip()[:1] == document["answer"])
        right = right and (request.task_name == "endings" or not _drawn(document, 5))
        if self._is_damaged(document["number"]):
            return (-30.0 if right else -4.0) - _noise(continuation + context), False
        return (-2.0 if right else -8.0) - _noise(continuation + context), right

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return [
            -60.0 * (1 + self._is_damaged(one.doc["number"])) - _noise(one.args[0])
            for one in requests
        ]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [self._text(one) for one in requests]

    def _text(self, request: Instance) -> str:
        document = request.doc
        if self._is_damaged(document["number"]):
            return "damaged words"
        if request.task_name == "sums":
            return f"it is {document['number'] + _drawn(document, 5)}"
        return str(document["sentence"]).replace("man", "person")


def _noise(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def _drawn(document: Mapping[str, Any], one_of: int) -> bool:
    """Return True for one of so many documents."""
    return bool(document["number"] % one_of == 0)


def write_folder(
    folder: Path, is_damaged: Callable[[int], bool], names: Sequence[str] = tuple(TASKS)
) -> Path:
    """Evaluate a made-up model on tasks and write what lm-eval writes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.parent / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in _documents()))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
    configs = [{"task": name, "test_split": "test"} | data | TASKS[name] for name in names]
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    results: Any = simple_evaluate(
        model=MadeUpModel(is_damaged),
        tasks=configs,
        bootstrap_iters=0,
        evaluation_tracker=tracker,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, lines in samples.items():
        tracker.save_results_samples(task_name=name, samples=lines)
    return folder


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]) / "base", lambda _: False)
    write_folder(Path(sys.argv[1]) / "worse", lambda number: number % 3 == 0)
