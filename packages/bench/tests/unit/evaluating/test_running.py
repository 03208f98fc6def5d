from pathlib import Path

import pytest
import yaml

from assay.errors import UsageError
from assay_bench.battery.suites import TaskSuite
from assay_bench.evaluating.running import command_line, parse_backend


def test_a_backend_gets_the_tasks_with_their_files(tmp_path: Path) -> None:
    backend = parse_backend("vllm", ["pretrained=org/model", "dtype=bfloat16"], 1)
    assert backend is not None
    words = command_line(backend, TaskSuite(tasks=["addition", "mmlu"], fewshot=5), 20, tmp_path)
    assert words[1:] == [
        *("-m", "lm_eval", "run", "--model", "vllm", "--tasks", "addition,mmlu"),
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
    words = command_line(backend, TaskSuite(tasks=["mmlu"]), None, tmp_path)
    assert words[1:7] == [
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "4",
        "-m",
        "lm_eval",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "processes", "told"),
    [
        (None, ["a=b"], 1, "--model-args and --processes need --model-backend"),
        (None, [], 2, "--model-args and --processes need --model-backend"),
        ("hf", ["device=cpu"], 2, "--processes needs accelerators"),
        ("hf", ["pretrained"], 1, "--model-args pretrained: expected one KEY=VALUE"),
    ],
)
def test_useless_arguments_are_refused(
    name: str | None, arguments: list[str], processes: int, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        parse_backend(name, arguments, processes)


def test_comma_in_a_value_is_refused(tmp_path: Path) -> None:
    backend = parse_backend("hf", ["pretrained=a,b"], 1)
    assert backend is not None
    with pytest.raises(UsageError, match="at commas"):
        command_line(backend, TaskSuite(tasks=["mmlu"]), None, tmp_path)
