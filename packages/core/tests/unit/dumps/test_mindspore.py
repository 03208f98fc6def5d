"""Dumps that msprobe writes of MindSpore: cells, primitives and .npy files."""

import json
import os
from pathlib import Path

import numpy as np

from assay.dumps.recognizing import open_dump


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
    assert {str(one.site): dump.read(one).tolist() for one in dump.tensors} == {
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
    assert [str(one.site) for one in dump.tensors if dump.read_intact(one) is None] == [
        "embed:output forward step 0"
    ]
