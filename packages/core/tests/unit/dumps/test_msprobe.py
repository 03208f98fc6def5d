"""Dumps of msprobe, of PyTorch and MindSpore."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError

Call = dict[str, object]


def describe(value: object, name: str, folder: Path | None) -> object:
    """Describe a value as dump.json does. Write tensors into `folder`, unless it is None."""
    if isinstance(value, Tensor):
        entry: dict[str, Any] = {
            "type": "torch.Tensor",
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "Max": value.max().item(),
            "Min": value.min().item(),
            "Mean": value.mean().item() if value.is_floating_point() else None,
            "Norm": value.norm().item() if value.is_floating_point() else None,
        }
        if folder is not None:
            torch.save(value, folder / f"{name}.pt")
            entry["data_name"] = f"{name}.pt"
        return entry
    if isinstance(value, list):
        return [describe(item, f"{name}.{number}", folder) for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: describe(item, f"{name}.{key}", folder) for key, item in value.items()}
    return value if value is None else {"type": type(value).__name__, "value": value}


def write(
    folder: Path,
    calls: Mapping[str, Call],
    *,
    process: str = "step0/proc77",
    task: str = "tensor",
    level: str = "L0",
    construct: object = None,
) -> Path:
    """Write the dump of one process. `calls` is the content of dump.json, with tensors in it."""
    (folder / process / "dump_tensor_data").mkdir(parents=True)
    files = folder / process / "dump_tensor_data" if task == "tensor" else None
    data = {key: describe(call, key, files) for key, call in calls.items()}
    index = {"task": task, "level": level, "framework": "pytorch", "data": data}
    (folder / process / "dump.json").write_text(json.dumps(index))
    if construct is not None:
        (folder / process / "construct.json").write_text(json.dumps(construct))
    return folder


def number(value: float) -> Tensor:
    return torch.tensor([float(value)])


def output(value: float) -> Call:
    return {"input_args": [], "input_kwargs": {}, "output": [number(value)]}


def contents(dump: Dump) -> dict[str, object]:
    return {str(one.site): one.read().tolist() for one in dump.tensors}


NORM = "Module.model.norm.Norm.forward.0"


def test_module_call_has_its_arguments_outputs_and_parameters(tmp_path: Path) -> None:
    call: Call = {
        "input_args": [number(1), None, 2.5],
        "input_kwargs": {"mask": number(2), "tables": [number(3), number(4)]},
        "output": [number(5)],
        "parameters": {"weight": number(6)},
    }
    dump = open_dump(write(tmp_path, {NORM: call}))
    assert dump.format == "msprobe"
    assert contents(dump) == {
        "model.norm:input.0 forward step 0": [1.0],
        "model.norm:input.mask forward step 0": [2.0],
        "model.norm:input.tables.0 forward step 0": [3.0],
        "model.norm:input.tables.1 forward step 0": [4.0],
        "model.norm:output forward step 0": [5.0],
        "model.norm:parameter.weight forward step 0": [6.0],
    }
    first = dump.tensors[0]
    assert (first.class_name, first.dtype, first.shape) == ("Norm", "float32", (1,))
    assert first.key == f"step0/proc77/dump_tensor_data/{NORM}.input_args.0.pt"
    assert dict(dump.provenance) == {"task": "tensor L0"}


def test_several_outputs_and_fields_have_names(tmp_path: Path) -> None:
    calls: dict[str, Call] = {
        "Module.a.A.forward.0": {"output": [number(1), None, number(2)]},
        "Module.b.B.forward.0": {"output": [{"logits": number(3)}]},
        "Module.module.c.C.forward.0": {"output": [[number(4), number(5)]]},
    }
    assert contents(open_dump(write(tmp_path, calls))) == {
        "a:output.0 forward step 0": [1.0],
        "a:output.2 forward step 0": [2.0],
        "b:output.logits forward step 0": [3.0],
        "c:output.0 forward step 0": [4.0],
        "c:output.1 forward step 0": [5.0],
    }


def test_statistics_are_read_without_files(tmp_path: Path) -> None:
    """(3, 4) has norm 5. Integers have no mean and no norm."""
    call: Call = {"input_args": [torch.tensor([7, 1])], "output": [torch.tensor([3.0, 4.0])]}
    dump = open_dump(write(tmp_path, {NORM: call}, task="statistics"))
    tokens, hidden = dump.tensors
    assert (tokens.has_values, hidden.has_values) == (False, False)
    assert tokens.statistics == {"max": 7.0, "min": 1.0}
    assert hidden.statistics == {"max": 4.0, "min": 3.0, "mean": 3.5, "norm": 5.0}


def test_call_counter_of_a_generation_is_the_pass(tmp_path: Path) -> None:
    """`shared` runs twice in each of the three passes."""
    calls = {}
    for token in range(3):
        calls[f"Module.a.A.forward.{token}"] = output(token)
        calls[f"Module.b.B.forward.{token}"] = output(token)
        for call in (0, 1):
            calls[f"Module.shared.C.forward.{2 * token + call}"] = output(10 * token + call)
    assert contents(open_dump(write(tmp_path, calls))) == {
        "a:output forward step 0": [0.0],
        "b:output forward step 0": [0.0],
        "shared:output forward step 0": [0.0],
        "shared:output forward step 0 call 1": [1.0],
        "a:output forward step 1": [1.0],
        "b:output forward step 1": [1.0],
        "shared:output forward step 1": [10.0],
        "shared:output forward step 1 call 1": [11.0],
        "a:output forward step 2": [2.0],
        "b:output forward step 2": [2.0],
        "shared:output forward step 2": [20.0],
        "shared:output forward step 2 call 1": [21.0],
    }


def test_step_of_a_generation_is_its_batch(tmp_path: Path) -> None:
    for step in (0, 1):
        write(tmp_path, {NORM: output(step)}, process=f"step{step}/proc77")
    assert contents(open_dump(tmp_path)) == {
        "model.norm:output forward step 0": [0.0],
        "model.norm:output forward step 0 micro-batch 1": [1.0],
    }


def test_training_has_steps_micro_batches_and_gradients(tmp_path: Path) -> None:
    """In backward, msprobe's `input` is the gradient of the output."""
    for step in (0, 1):
        calls: dict[str, Call] = {}
        for batch in (0, 1):
            value = 10.0 * step + batch
            calls[f"Module.a.A.forward.{batch}"] = output(value)
            gradients: Call = {"input": [number(value + 100)], "output": [number(value + 200)]}
            calls[f"Module.a.A.backward.{batch}"] = gradients
            calls[f"Module.a.A.parameters_grad.{batch}"] = {"weight": [number(value + 300)]}
        write(tmp_path, calls, process=f"step{step}/proc77")
    dump = open_dump(tmp_path)
    expected = {}
    for step in (0, 1):
        for batch in (0, 1):
            place = f"step {step}{' micro-batch 1' if batch else ''}"
            value = 10.0 * step + batch
            expected[f"a:output forward {place}"] = [value]
            expected[f"a:output backward {place}"] = [value + 100]
            expected[f"a:input.0 backward {place}"] = [value + 200]
            expected[f"a:parameter.weight backward {place}"] = [value + 300]
    assert contents(dump) == expected


def test_ranks_are_told_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, {NORM: output(rank)}, process=f"step0/rank{rank}")
    assert contents(open_dump(tmp_path)) == {
        "model.norm:output forward step 0": [0.0],
        "model.norm:output forward step 0 rank 1": [1.0],
    }


OPERATIONS: dict[str, Call] = {
    "Tensor.__mul__.0.forward": output(1),
    "Tensor.__mul__.1.forward": output(2),
    "Torch.rsqrt.0.forward": output(3),
    NORM: output(4),
    "Functional.linear.0.forward": output(5),
}


def test_operations_belong_to_the_module_that_called_them(tmp_path: Path) -> None:
    construct = {
        "Tensor.__mul__.0.forward": NORM,
        "Tensor.__mul__.1.forward": [NORM, None],
        "Torch.rsqrt.0.forward": "Tensor.__mul__.1.forward",
        NORM: None,
        "Functional.linear.0.forward": "Module.lm_head.Linear.forward.0",
    }
    dump = open_dump(write(tmp_path, OPERATIONS, level="mix", construct=construct))
    assert contents(dump) == {
        "model.norm:op.0.Tensor___mul__.output forward step 0": [1.0],
        "model.norm:op.1.Tensor___mul__.output forward step 0": [2.0],
        "model.norm:op.0.Torch_rsqrt.output forward step 0": [3.0],
        "model.norm:output forward step 0": [4.0],
        "lm_head:op.0.Functional_linear.output forward step 0": [5.0],
    }


def test_operations_are_in_the_pass_of_their_module(tmp_path: Path) -> None:
    calls: dict[str, Call] = {}
    construct = {}
    for token in (0, 1):
        module, operation = f"Module.a.A.forward.{token}", f"Torch.rsqrt.{token}.forward"
        calls |= {operation: output(token), module: output(token)}
        construct[operation] = module
    dump = open_dump(write(tmp_path, calls, level="mix", construct=construct))
    assert contents(dump)["a:op.0.Torch_rsqrt.output forward step 1"] == [1.0]


@pytest.mark.parametrize("operation", ["__setitem__", "copy_", "index_put_"])
def test_destination_of_a_write_is_left_out(tmp_path: Path, operation: str) -> None:
    # It may be uninitialized memory, as of torch.empty.
    written: Call = {"input_args": [number(1), number(2)], "input_kwargs": {}, "output": [None]}
    added: Call = {"input_args": [number(3)], "input_kwargs": {}, "output": [None]}
    calls = {f"Tensor.{operation}.0.forward": written, "Tensor.add_.0.forward": added}
    dump = open_dump(write(tmp_path, calls, level="L1"))
    assert list(contents(dump).values()) == [[2.0], [3.0]]


def test_operations_without_callers_belong_to_the_model(tmp_path: Path) -> None:
    calls = {"Torch.rsqrt.0.forward": output(1), "Torch.rsqrt.1.forward": output(2)}
    calls["Torch.rsqrt.1.backward"] = {"input": [number(3)], "output": [number(4)]}
    assert contents(open_dump(write(tmp_path, calls, level="L1"))) == {
        "(model):op.0.Torch_rsqrt.output forward step 0": [1.0],
        "(model):op.1.Torch_rsqrt.output forward step 0": [2.0],
        "(model):op.0.Torch_rsqrt.output backward step 0": [3.0],
        "(model):op.0.Torch_rsqrt.input.0 backward step 0": [4.0],
    }


@pytest.mark.parametrize("part", [".", "step0", "step0/proc77"])
def test_any_folder_of_a_dump_can_be_named(tmp_path: Path, part: str) -> None:
    write(tmp_path, {NORM: output(1)})
    assert contents(open_dump(tmp_path / part)) == {"model.norm:output forward step 0": [1.0]}


def test_current_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {NORM: output(1)}, process="step0/rank3")
    monkeypatch.chdir(tmp_path / "step0" / "rank3")
    assert open_dump(".").tensors[0].site.at.rank == 3


def test_folder_of_a_process_may_be_renamed(tmp_path: Path) -> None:
    write(tmp_path, {NORM: output(1)}, process="renamed")
    assert len(open_dump(tmp_path / "renamed").tensors) == 1


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    for process in ("step0/proc77", "step0/proc78"):
        write(tmp_path, {NORM: output(1)}, process=process)
    with pytest.raises(DumpError) as raised:
        open_dump(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path} holds proc77 and proc78, both step 0, rank 0: name the folder of one of them"
    )


def test_missing_file_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, {NORM: {"output": [number(1), number(2)]}})
    file = f"step0/proc77/dump_tensor_data/{NORM}.output.0.pt"
    (tmp_path / file).unlink()
    dump = open_dump(tmp_path)
    assert contents(dump) == {"model.norm:output.1 forward step 0": [2.0]}
    assert list(dump.problems) == [f"{file} is missing"]


def test_run_that_ended_early_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {NORM: output(1)})
    (tmp_path / "step0/proc77/dump.json").unlink()
    with pytest.raises(
        DumpError, match=r"has no dump\.json: the run ended before msprobe's stop\(\)"
    ):
        open_dump(tmp_path)


def entry(**changes: object) -> dict[str, object]:
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], **changes}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "it has no table `data`"),
        ({"Module.a": {}}, "unknown key Module.a"),
        ({NORM: []}, f"{NORM} is not a table"),
        ({NORM: {"output": [entry(shape=[-1, 2])]}}, f"{NORM}: [-1, 2] is not a shape"),
        ({NORM: {"output": [entry(shape="(1,)")]}}, f"{NORM}: '(1,)' is not a shape"),
        ({NORM: {"output": [entry(shape=[True])]}}, f"{NORM}: [True] is not a shape"),
        ({NORM: {"output": [entry(Max=10**400)]}}, f"{NORM}: a statistic is too large"),
        ({NORM: {"output": [entry(data_name="../../../secret.pt")]}}, "outside of the dump"),
        ({NORM: {"output": [entry(data_name="link.pt")]}}, "outside of the dump"),
        ({NORM: {"output": [entry(data_name="a\0b")]}}, "null"),
        ({NORM: {"output": [entry(data_name="a" * 300)]}}, "File name too long"),
    ],
)
def test_hostile_index_is_one_error(tmp_path: Path, data: object, problem: str) -> None:
    folder = write(tmp_path / "dump", {}) / "step0/proc77"
    (tmp_path / "secret.pt").touch()
    (folder / "dump_tensor_data/link.pt").symlink_to("../../../../secret.pt")
    (folder / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))
    with pytest.raises(UnreadableFileError) as raised:
        open_dump(tmp_path / "dump")
    assert problem in str(raised.value)


@pytest.mark.parametrize("text", ["", '{"data": {"Module.a.A.forward.0": {"out', "[" * 5000, "[]"])
def test_damaged_index_is_one_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, {})
    (tmp_path / "step0/proc77/dump.json").write_text(text)
    with pytest.raises(UnreadableFileError, match=r"dump\.json: "):
        open_dump(tmp_path)


def test_empty_gradient_is_not_a_tensor(tmp_path: Path) -> None:
    calls: dict[str, Call] = {"Module.a.A.parameters_grad.0": {"weight": [], "bias": [None]}}
    assert list(open_dump(write(tmp_path, calls)).tensors) == []


def test_operations_that_call_each_other_are_one_error(tmp_path: Path) -> None:
    first, second = "Torch.a.0.forward", "Torch.b.0.forward"
    construct = {first: second, second: first}
    write(tmp_path, {first: output(1)}, level="mix", construct=construct)
    with pytest.raises(UnreadableFileError, match=f"construct.json: {first} is its own caller"):
        open_dump(tmp_path)


@pytest.mark.parametrize("construct", [[], {}, {"Torch.a.0.forward": []}, {"Torch.a.0.forward": 3}])
def test_table_without_callers_is_not_a_defect(tmp_path: Path, construct: object) -> None:
    calls = {"Torch.a.0.forward": output(1)}
    dump = open_dump(write(tmp_path, calls, level="mix", construct=construct))
    assert list(contents(dump)) == ["(model):op.0.Torch_a.output forward step 0"]


@pytest.mark.parametrize(
    "part", ["step0/proc77", "step0/proc77/dump.json", "step0/proc77/construct.json"]
)
def test_link_out_of_the_dump_is_refused(tmp_path: Path, part: str) -> None:
    other = write(tmp_path / "other", OPERATIONS, construct={})
    link = write(tmp_path / "dump", OPERATIONS, process="step0/proc77") / part
    if part == "step0/proc77":
        link.rename(tmp_path / "moved")
    link.unlink(missing_ok=True)
    link.symlink_to(other / part)
    with pytest.raises(UnreadableFileError, match="outside of the dump"):
        open_dump(tmp_path / "dump")


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (_Hostile(), "objects other than tensors, which assay does not unpickle"),
        ([1], "its tensor is a list, not a tensor"),
        (torch.zeros(1).expand(1 << 20, 1 << 20), "has more elements than are stored"),
        (torch.eye(2).to_sparse(), "its tensor is not a dense tensor: torch.sparse_coo"),
    ],
)
def test_hostile_tensor_is_one_error(tmp_path: Path, content: object, problem: str) -> None:
    write(tmp_path, {NORM: output(1)})
    torch.save(content, tmp_path / f"step0/proc77/dump_tensor_data/{NORM}.output.0.pt")
    dump = open_dump(tmp_path)
    with pytest.raises(UnreadableFileError) as raised:
        dump.tensors[0].read()
    assert problem in str(raised.value)
    assert not Path("hostile").exists()


def test_complex_values_are_read(tmp_path: Path) -> None:
    """Rotary embeddings of some models are complex. msprobe records no statistics of them."""
    folder = write(tmp_path, {}) / "step0/proc77"
    torch.save(torch.tensor([1j]), folder / "dump_tensor_data/a.pt")
    data = {NORM: {"output": [entry(dtype="torch.complex64", data_name="a.pt")]}}
    (folder / "dump.json").write_text(json.dumps({"data": data}))
    assert contents(open_dump(tmp_path)) == {"model.norm:output forward step 0": [1j]}


def write_mindspore(folder: Path) -> Path:
    """Write what msprobe 26.2 writes of a MindSpore 2.10 cell: .npy files, and dtypes such as Float32."""
    process = folder / "step0/proc9"
    (process / "dump_tensor_data").mkdir(parents=True)
    tensors = {
        "input.0": np.array([[3, 4]], np.int32),
        "output.0": np.array([[1.0], [2.0]], np.float32),
        "parameters.embedding_table": np.array([[5.0]], np.float32),
    }
    entries = {}
    for name, value in tensors.items():
        file = f"Cell.embed.Embedding.forward.0.{name}.npy"
        np.save(process / "dump_tensor_data" / file, value)
        dtype = str(value.dtype).capitalize()
        entry = {"type": "mindspore.Tensor", "dtype": dtype, "shape": list(value.shape)}
        entries[name] = entry | {"data_name": file}
    call = {
        "input_args": [entries["input.0"]],
        "output": [entries["output.0"]],
        "parameters": {"embedding_table": entries["parameters.embedding_table"]},
    }
    operation = {"input_args": [entries["input.0"]], "output": [{"type": "int", "value": 1}]}
    data = {
        "Primitive.shape.Shape.0.forward": operation,
        "Cell.embed.Embedding.forward.0": call,
        "Cell.embed.Embedding.parameters_grad.0": {
            "embedding_table": [entries["parameters.embedding_table"]]
        },
    }
    index = {"task": "tensor", "level": "mix", "framework": "mindspore", "data": data}
    (process / "dump.json").write_text(json.dumps(index))
    return folder


def test_cells_of_mindspore_are_modules(tmp_path: Path) -> None:
    dump = open_dump(write_mindspore(tmp_path))
    assert {str(one.site): one.read().tolist() for one in dump.tensors} == {
        "(model):op.0.Primitive_shape_Shape.input.0 forward step 0": [[3, 4]],
        "embed:input.0 forward step 0": [[3, 4]],
        "embed:output forward step 0": [[1.0], [2.0]],
        "embed:parameter.weight forward step 0": [[5.0]],
        "embed:parameter.weight backward step 0": [[5.0]],
    }
    assert [one.dtype for one in dump.tensors[1:3]] == ["int32", "float32"]
    assert dump.tensors[1].class_name == "Embedding"


def test_a_lost_array_of_mindspore_is_named(tmp_path: Path) -> None:
    dump = open_dump(write_mindspore(tmp_path))
    file = next(tmp_path.rglob("*Embedding.forward.0.output.0.npy"))
    os.truncate(file, 100)
    assert [str(one.site) for one in dump.tensors if one.read_intact() is None] == [
        "embed:output forward step 0"
    ]
