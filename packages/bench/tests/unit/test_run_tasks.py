"""Suites and their documents, and the command line of lm-eval."""

import inspect
import json
import re
from pathlib import Path

import pytest
import yaml

from assay.errors import UsageError
from assay.files import seal
from assay.models.sources import hash_files, resolve_model
from assay.runs import SilentProgress
from assay_bench import run_tasks
from assay_bench.comparing import Terms
from assay_bench.lm_eval_metrics import METRICS
from assay_bench.run_tasks import (
    DONE_FILE,
    TASKS,
    Backend,
    EvaluationRequest,
    Settings,
    TaskSuite,
    command_line,
    documents_of,
    evaluate,
    load_task,
    make_unknown_task_error,
    parse_backend,
    parse_batch_size,
    read_suite,
    run_command_line,
    task_folder,
)

PAGE = Path(__file__).parents[4] / "docs/benchmark.md"


def test_documented_margins_are_those_of_the_shipped_suites() -> None:
    rows = re.findall(r"^\| `(\w+)`.*\| (\S+) \| (\S+) \|$", PAGE.read_text(), re.MULTILINE)
    shipped = {}
    for name in ("core", "leaderboard", "offline", "retrained"):
        suite = read_suite(name)
        assert set(suite.clusters) <= set(suite.tasks) != set()
        shipped[name] = (f"{suite.terms.accuracy:g}", f"{suite.terms.log_probability:g}")
    assert {name: tuple(limits) for name, *limits in rows} == shipped


def test_a_suite_chooses_metrics(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('tasks = ["hellaswag"]\n[terms.metrics]\nhellaswag = ["acc_norm"]\n')
    assert read_suite(str(path)).terms == Terms(metrics={"hellaswag": ("acc_norm",)})


def test_the_offline_suite_needs_no_network(tmp_path: Path) -> None:
    assert read_suite("offline").tasks == list(TASKS)
    for task in TASKS:
        config = load_task(task, tmp_path)
        assert isinstance(config, dict)
        assert config["dataset_path"] == "json"


@pytest.mark.parametrize("task", TASKS)
def test_documents_are_many_distinct_and_reproducible(task: str) -> None:
    documents = documents_of(task)
    assert len(documents) >= 250
    assert len({str(document) for document in documents}) == len(documents)
    assert documents_of(task) == documents


def test_right_choices_are_evenly_distributed() -> None:
    labels = [document["label"] for document in documents_of("next-text")]
    assert all(90 < labels.count(label) < 160 for label in range(4))
    assert all(len(set(one["choices"])) == 4 for one in documents_of("next-text"))


def test_sums_are_right() -> None:
    for document in documents_of("addition"):
        first, second = document["question"].removesuffix("=").split("+")
        assert int(first) + int(second) == int(document["sum"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tasks = []", "tasks: it needs at least 1 item"),
        ("tasks = ['a']\nterms = {accuracy = 0}", "terms.accuracy: it must be greater than 0"),
        ("tasks = ['a']\nterms = {accuracy = 2}", "terms.accuracy: it must be less than 1"),
        (
            "tasks = ['a']\nmargin = 1",
            "unknown key 'margin'; known: tasks, clusters, fewshot, terms",
        ),
        ("tasks = [", "Invalid value"),
    ],
)
def test_invalid_suite_names_the_key(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_suite(str(path))
    with pytest.raises(UsageError, match="suite x does not exist; shipped suites: core, leader"):
        read_suite("x")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "expected keys with values, such as task: NAME"),
        ("a: 1", "the key task must hold a name"),
        ("task: a\ninclude: t.yaml", "t.yaml includes itself"),
        ("task: a\ninclude: absent.yaml", "absent.yaml: cannot be read: No such file"),
        ("task: a\ndataset_path: json", "expected dataset_kwargs"),
        (
            "task: a\ndataset_path: json\ndataset_kwargs: {data_files: {test: d}}",
            "cannot be read: No such file",
        ),
        (
            "task: a\ndataset_path: json\ndataset_kwargs: {data_files: {test: e}}",
            "e has no documents",
        ),
        ("task: !function a.b", "not plain YAML"),
        ("task: a/b", "becomes a file name"),
        ("a: &x [1]\ntask: *x", r"t.yaml: \*x is an alias: repeat the value"),
        ("task: a" + " " * (1 << 17), "t.yaml: it is larger than 128 KiB"),
        ("task: a\ndataset_path: json\ndataset_kwargs: [1]", "expected dataset_kwargs"),
        ("task: " + "[" * 5000, "not plain YAML"),
        (
            "task: a\noutput_type: multiple_choice\nmetric_list: [{metric: acc_nrm}]",
            "t.yaml: unknown metric of multiple_choice 'acc_nrm'; did you mean acc_norm",
        ),
        (
            "task: a\noutput_type: loglikelihood\nmetric_list: [{metric: bleu}]",
            "'bleu'; known: acc, perplexity",
        ),
        ("task: a\nmetric_list: [{metric: exact_mach}]", "did you mean exact_match"),
    ],
)
def test_invalid_task_is_an_error(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "e").write_text("[]\n")
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        load_task(str(path), tmp_path)


def test_known_metrics_are_those_of_lm_eval(tmp_path: Path) -> None:
    """lm-eval compares each name with those of the task in the code of its results."""
    from lm_eval.api import metrics  # noqa: F401 - registers them
    from lm_eval.api.registry import METRIC_REGISTRY
    from lm_eval.api.task import ConfigurableTask

    code = inspect.getsource(ConfigurableTask.process_results)
    parts = re.split(r'if self.OUTPUT_TYPE == "(\w+)":', code)
    assert parts[1::2] == list(METRICS)
    found = {
        kind: set(re.findall(r'"(\w+)"\s+in (?:use_metric|self._metric_fn_list)', part))
        for kind, part in zip(parts[1::2], parts[2::2], strict=True)
    }
    found["generate_until"] = set(METRIC_REGISTRY)
    assert {kind: set(names) for kind, names in METRICS.items()} == found
    path = tmp_path / "t.yaml"
    path.write_text("task: a\nmetric_list: [{metric: rouge, hf_evaluate: true}, {metric: ter}]")
    assert load_task(str(path), tmp_path)


@pytest.mark.parametrize("name", ["acc", "acc_norm", "exact_match", "f1"])
def test_a_metric_that_a_task_turns_around_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    entry = f"{{metric: {name}, higher_is_better: false}}"
    path.write_text(f"task: a\noutput_type: multiple_choice\nmetric_list: [{entry}]")
    with pytest.raises(UsageError, match=f"higher_is_better: false of {name} would judge a worse"):
        load_task(str(path), tmp_path)
    path.write_text("task: a\nmetric_list: [{metric: ter, higher_is_better: false}]")
    assert load_task(str(path), tmp_path)


def test_a_task_file_includes_others_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "base.yaml").write_text("doc_to_text: a\noutput_type: generate_until\n")
    (tmp_path / "tasks" / "t.yaml").write_text("include: base.yaml\ntask: t\ndoc_to_text: b\n")
    monkeypatch.chdir(tmp_path)
    assert load_task("tasks/t.yaml", tmp_path) == {
        "doc_to_text": "b", "output_type": "generate_until", "task": "t",
    }  # fmt: skip


def test_a_backend_gets_the_tasks_with_their_files(tmp_path: Path) -> None:
    backend = parse_backend("vllm", ["pretrained=org/model", "dtype=bfloat16"], 1)
    assert backend is not None
    suite = TaskSuite(tasks=["addition", "mmlu"], fewshot=5)
    words = command_line(backend, suite, Settings(limit=20), tmp_path)
    assert words[1:] == [
        *("-m", "assay_bench.task_worker", "run", "--model", "vllm", "--tasks", "addition,mmlu"),
        *("--model_args", "pretrained=org/model,dtype=bfloat16"),
        *("--include_path", str(tmp_path / "task-files")),
        *("--output_path", str(tmp_path / "lm-eval"), "--num_fewshot", "5", "--limit", "20"),
        "--log_samples",
    ]
    written = yaml.safe_load((tmp_path / "task-files" / "addition.yaml").read_text())
    assert Path(written["dataset_kwargs"]["data_files"]["test"]).is_file()


def test_several_processes_are_started_by_accelerate(tmp_path: Path) -> None:
    backend = parse_backend("hf", ["pretrained=m"], 4)
    assert backend is not None
    words = command_line(backend, TaskSuite(tasks=["mmlu"]), Settings(), tmp_path)
    assert words[1:7] == [
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "4",
        "-m",
        "assay_bench.task_worker",
    ]


def test_settings_reach_lm_eval_by_its_names(tmp_path: Path) -> None:
    backend = parse_backend("hf", ["pretrained=org/model"], 1, "trust")
    assert backend is not None
    settings = Settings(
        batch_size="auto",
        apply_chat_template=True,
        system_instruction="Be brief.",
        gen_kwargs={"temperature": "0", "max_gen_toks": "8"},
    )
    words = command_line(backend, TaskSuite(tasks=["mmlu"]), settings, tmp_path)
    assert words[words.index("--batch_size") :] == [
        *("--batch_size", "auto", "--apply_chat_template", "--system_instruction", "Be brief."),
        *("--gen_kwargs", "temperature=0", "max_gen_toks=8", "--trust_remote_code"),
        "--log_samples",
    ]


@pytest.mark.parametrize(("name", "size"), [("hf", ["--batch_size", "32"]), ("vllm", [])])
def test_only_hf_gets_another_default_batch_size(
    name: str, size: list[str], tmp_path: Path
) -> None:
    backend = parse_backend(name, ["pretrained=org/model"], 1)
    assert backend is not None
    words = command_line(backend, TaskSuite(tasks=["mmlu"]), Settings(), tmp_path)
    place = words.index("--output_path") + 2
    assert words[place:] == [*size, "--log_samples"]


@pytest.mark.parametrize(
    ("arguments", "is_local"),
    [
        ({"pretrained": "FOLDER"}, True),
        ({"pretrained": "FOLDER", "tokenizer": "FOLDER", "dtype": "float32"}, True),
        ({"pretrained": "FOLDER", "tokenizer": "org/tokenizer"}, False),
        ({"pretrained": "org/model"}, False),
        ({"model": "name", "base_url": "http://localhost"}, False),
    ],
)
def test_only_folders_need_no_hub(
    arguments: dict[str, str], is_local: bool, tmp_path: Path
) -> None:
    found = {key: value.replace("FOLDER", str(tmp_path)) for key, value in arguments.items()}
    assert Backend("hf", found).is_local is is_local


@pytest.mark.parametrize("text", ["0", "-1", "auto:0", "all", "1.5", ""])
def test_invalid_batch_size_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=f"--batch-size {text}: expected a number above 0, or auto"
    ):
        parse_batch_size(text)
    assert [parse_batch_size(one) for one in ("16", "auto", "auto:4", None)] == [
        *("16", "auto", "auto:4"),
        None,
    ]


def test_documents_of_a_task_file_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval reads the written task file in another folder."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "d.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "tasks" / "t.yaml").write_text(
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: d.jsonl}}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_task("tasks/t.yaml", tmp_path)
    assert isinstance(config, dict)
    found = config["dataset_kwargs"]["data_files"]["test"]
    assert found == str(tmp_path / "tasks" / "d.jsonl")
    # The results of a file are in a folder of its name, from wherever it is named.
    assert {task_folder(tmp_path, name).name for name in ("tasks/t.yaml", "t.yaml")} == {"t"}


@pytest.mark.parametrize(
    ("name", "arguments", "processes", "told"),
    [
        (None, ["a=b"], 1, "--model-args and --processes need --model-backend"),
        (None, [], 2, "--model-args and --processes need --model-backend"),
        ("hf", ["device=cpu"], 2, "--processes needs accelerators"),
        ("hf", ["pretrained"], 1, "--model-args pretrained: expected KEY=VALUE"),
        ("hf", ["dtype=auto", "dtype=auto"], 1, "--model-args dtype is given twice"),
        ("hf", ["batch_size=16"], 1, "batch_size=16: --batch-size sets the batch size"),
        ("hf", ["pretrained=./absent"], 1, "model './absent': no such folder"),
        ("hf", ["pretrained=a/b", "peft=./absent"], 1, "model './absent': no such folder"),
    ],
)
def test_useless_arguments_are_refused(
    name: str | None, arguments: list[str], processes: int, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        parse_backend(name, arguments, processes)


def test_comma_in_a_value_is_refused(tmp_path: Path) -> None:
    backend = parse_backend("hf", ["dtype=a,b"], 1)
    assert backend is not None
    with pytest.raises(UsageError, match="at commas"):
        command_line(backend, TaskSuite(tasks=["mmlu"]), Settings(), tmp_path)


def _evaluated(folder: Path, tasks: list[str]) -> EvaluationRequest:
    """Leave the files of a finished evaluation of `tasks` in `folder`."""
    content = hash_files(resolve_model("micro:llama"), "refuse")
    suite = TaskSuite(tasks=tasks)
    request = EvaluationRequest(
        model="micro:llama", run="cpu/float32", suite=suite, content=content, folder=folder
    )
    for task in tasks:
        place = task_folder(folder, task)
        place.mkdir(parents=True)
        (place / "results_1.json").write_text("{}")
        (place / DONE_FILE).write_text(seal(request.key()))
    evaluate(request, SilentProgress())
    (folder / "verdict.json").write_text("{}")
    return request


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"limit": 5, "suite": TaskSuite(tasks=["cloze"])}, r"\(4 tasks, no limit\)"),
        ({"limit": 5}, r"\(4 tasks, no limit\)"),
        ({"suite": TaskSuite(tasks=["cloze"])}, r"\(4 tasks, no limit\)"),
        ({"suite": TaskSuite(tasks=[*TASKS, "mmlu"])}, r"\(4 tasks, no limit\)"),
        (
            {"suite": TaskSuite(tasks=list(TASKS), fewshot=2), "run": "cpu/bfloat16"},
            r"\(4 tasks, no limit; its fewshot is None, here 2; its run is cpu/float32, here cpu/bfloat16\)",
        ),
    ],
)
def test_an_evaluation_of_other_questions_is_never_replaced(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    request = _evaluated(tmp_path, list(TASKS))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=rf"holds another evaluation {told}: name a new folder"):
        evaluate(request.model_copy(update=change), SilentProgress())
    backend = parse_backend("hf", ["pretrained=m"], 1)
    assert backend is not None
    with pytest.raises(UsageError, match="holds a finished evaluation: name a new folder"):
        run_command_line(backend, request.suite, Settings(), tmp_path, SilentProgress())
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_an_interrupted_evaluation_continues_with_its_own_tasks_alone(tmp_path: Path) -> None:
    request = _evaluated(tmp_path, ["cloze", "addition"])
    (tmp_path / "evaluation.json").unlink()
    evaluate(request, SilentProgress())
    assert (tmp_path / "evaluation.json").is_file()
    (tmp_path / "evaluation.json").unlink()
    with pytest.raises(UsageError, match=r"\(2 tasks, no limit\)"):
        evaluate(request.model_copy(update={"suite": TaskSuite(tasks=["cloze"])}), SilentProgress())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("helaswag", "did you mean hellaswag or "),
        ("next-txt", "did you mean next-text"),
        ("nosuchtask", "`lm-eval ls tasks` lists all"),
        ("nosuch_*", "`lm-eval ls tasks` lists all"),
    ],
)
def test_unknown_task_is_named_with_the_nearest_ones(name: str, hint: str) -> None:
    refused = make_unknown_task_error(name, ["hellaswag", "hellaswag_ar", "mmlu"])
    assert str(refused).startswith(f"task {name}: lm-eval does not know this name; {hint}")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"api_key": "x", "n": 1, "dtype": "a"}, {"api_key": "***", "n": 1, "dtype": "a"}),
        ("model=m,api_key=x", "model=m,api_key=***"),
        (None, None),
    ],
)
def test_secrets_in_the_arguments_of_a_model_are_hidden(
    given: object, written: object, tmp_path: Path
) -> None:
    (tmp_path / "results_1.json").write_text(json.dumps({"config": {"model_args": given}}))
    run_tasks._hide_secrets(tmp_path / "results_1.json")
    found = json.loads((tmp_path / "results_1.json").read_text())
    assert found == {"config": {"model_args": written}}
