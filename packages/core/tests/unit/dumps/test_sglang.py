"""Dumps of SGLang's dumper and of its older hooks: names, calls, layouts, and hostile files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError


class Experiment:
    """Writes the files of one experiment, with increasing dump indexes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.index = 0

    def add(
        self,
        name: str,
        value: Any = 0.0,
        *,
        step: int = 0,
        rank: int | None = 0,
        meta: dict[str, Any] | None = None,
        **context: Any,
    ) -> Path:
        self.index += 1
        keys = {"step": step, "rank": rank, "dump_index": self.index, "name": name, **context}
        keys = {key: item for key, item in keys.items() if item is not None}
        value = torch.tensor([value]) if isinstance(value, float) else value
        file = self.folder / ("___".join(f"{key}={item}" for key, item in keys.items()) + ".pt")
        torch.save({"value": value, "meta": {**keys, **(meta or {})}}, file)
        return file


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path / "dumps" / "run")


def sites(dump: Dump) -> list[str]:
    return [str(one.site) for one in dump.tensors]


def values(dump: Dump) -> dict[str, float]:
    return {str(one.site): one.read().item() for one in dump.tensors}


class TestDumper:
    @pytest.mark.parametrize(
        ("name", "site"),
        [
            ("non_intrusive__model.layers.0.mlp.inputs.0", "model.layers.0.mlp:input.0 forward"),
            ("non_intrusive__model.norm.inputs.x.1", "model.norm:input.x.1 forward"),
            ("non_intrusive__model.norm.output", "model.norm:output forward"),
            ("non_intrusive__model.norm.output.1", "model.norm:output.1 forward"),
            ("non_intrusive__output.next_token_logits", "(model):output.next_token_logits forward"),
            ("non_intrusive__inputs.0", "(model):input.0 forward"),
            ("non_intrusive__b.0.output.dense.output", "b.0.output.dense:output forward"),
            ("non_intrusive__b.0.output.inputs.0", "b.0.output:input.0 forward"),
            ("non_intrusive__module.a._orig_mod.output", "a:output forward"),
            ("input_ids", "(model):input.input_ids forward"),
            ("cu_seqlens_q", "(model):input.cu_seqlens_q forward"),
            ("grad__non_intrusive__a.output", "a:output backward"),
            ("param__model.norm.weight", "model.norm:parameter.weight forward"),
            ("grad__param__model.norm.weight", "model.norm:parameter.weight backward"),
            ("attention_scores", "attention_scores:output forward"),
            ("a=b.c", "a=b.c:output forward"),
            ("scores__of=a", "scores__of=a:output forward"),
        ],
    )
    def test_name_gives_the_address(self, experiment: Experiment, name: str, site: str) -> None:
        experiment.add(name, step=3)
        assert sites(open_dump(experiment.folder)) == [f"{site} step 3"]

    @pytest.mark.parametrize("part", ["", "run"])
    def test_experiment_and_the_folder_around_it(self, experiment: Experiment, part: str) -> None:
        experiment.add("non_intrusive__a.output", 2.5)
        opened = open_dump(experiment.folder.parent / part)
        assert opened.format == "sglang"
        assert values(opened) == {"a:output forward step 0": 2.5}
        assert (opened.tensors[0].dtype, opened.tensors[0].shape) == ("float32", (1,))

    def test_repeated_name_is_the_next_call(self, experiment: Experiment) -> None:
        for value, step in ((1.0, 0), (2.0, 0), (3.0, 1)):
            experiment.add("non_intrusive__a.output", value, step=step)
        assert values(open_dump(experiment.folder)) == {
            "a:output forward step 0": 1.0,
            "a:output forward step 0 call 1": 2.0,
            "a:output forward step 1": 3.0,
        }

    def test_damaged_file_is_a_problem_and_counts_as_a_call(self, experiment: Experiment) -> None:
        files = [experiment.add("non_intrusive__a.output", value) for value in (1.0, 2.0, 3.0)]
        files[1].write_bytes(b"")
        opened = open_dump(experiment.folder)
        assert values(opened) == {
            "a:output forward step 0": 1.0,
            "a:output forward step 0 call 2": 3.0,
        }
        (problem,) = opened.problems
        assert problem.startswith(f"{files[1]}: ")

    def test_dump_index_orders_the_files(self, experiment: Experiment) -> None:
        for number in range(12):
            experiment.add(f"non_intrusive__a.{number}.output")
        modules = [one.site.at.module for one in open_dump(experiment.folder).tensors]
        assert modules == [f"a.{number}" for number in range(12)]

    def test_inputs_are_in_order_with_the_end_of_their_call(self, experiment: Experiment) -> None:
        for name in ("a.inputs.0", "a.b.inputs.0", "a.b.output", "a.output"):
            experiment.add(f"non_intrusive__{name}")
        opened = open_dump(experiment.folder)
        assert [one.site.at.module for one in opened.tensors] == ["a.b", "a.b", "a", "a"]
        assert [one.order for one in opened.tensors] == [0, 1, 2, 3]

    def test_own_name_within_a_layer_is_part_of_the_layer(self, experiment: Experiment) -> None:
        experiment.add("scores", layer_id=3)
        assert sites(open_dump(experiment.folder)) == ["layers.3.scores:output forward step 0"]

    def test_ranks(self, experiment: Experiment) -> None:
        experiment.add("non_intrusive__a.output", 1.0, rank=2)
        experiment.add("non_intrusive__a.output", 2.0, rank=0)
        experiment.add("non_intrusive__a.output", 3.0, rank=None, meta={"world_rank": 1})
        assert values(open_dump(experiment.folder)) == {
            "a:output forward step 0": 2.0,
            "a:output forward step 0 rank 1": 3.0,
            "a:output forward step 0 rank 2": 1.0,
        }

    def test_dims_are_the_layout(self, experiment: Experiment) -> None:
        dims = "b s[cp:zigzag] (h*d)[tp] # dp:=moe_dp"
        experiment.add("non_intrusive__a.output", meta={"dims": dims})
        experiment.add("non_intrusive__b.output", meta={"dims": None})
        assert [one.layout for one in open_dump(experiment.folder).tensors] == [dims, ""]

    def test_tensors_in_a_list_or_dict_are_ports(self, experiment: Experiment) -> None:
        experiment.add("pair", [torch.tensor(1.0), None, torch.tensor(2.0)])
        experiment.add("table", {"left": torch.tensor(3.0), "right": "text"})
        assert values(open_dump(experiment.folder)) == {
            "pair:output.0 forward step 0": 1.0,
            "pair:output.2 forward step 0": 2.0,
            "table:output.left forward step 0": 3.0,
        }

    def test_short_texts_are_provenance_and_other_values_are_left_out(
        self, experiment: Experiment
    ) -> None:
        experiment.add("rids", ["a1", "b2"])
        experiment.add("rids", ["later"], step=1)
        experiment.add("qkv_format", "thd")
        experiment.add("long", ["x" * 300])
        experiment.add("number", 7)
        opened = open_dump(experiment.folder)
        assert opened.provenance == {"rids": "a1, b2", "qkv_format": "thd"}
        assert not opened.tensors

    def test_bare_tensor_of_an_early_version(self, experiment: Experiment) -> None:
        name = "forward_pass_id=2___rank=1___name=a___dump_index=7.pt"
        torch.save(torch.tensor(4.0), experiment.folder / name)
        assert values(open_dump(experiment.folder)) == {"a:output forward step 2 rank 1": 4.0}

    def test_parameter_is_read_without_gradient(self, experiment: Experiment) -> None:
        experiment.add("param__a.weight", torch.nn.Parameter(torch.ones(2)))
        opened = open_dump(experiment.folder)
        assert not opened.tensors[0].read().requires_grad

    def test_other_files_are_left_out(self, experiment: Experiment) -> None:
        experiment.add("non_intrusive__a.output")
        for name in ("x=1.pt", "step=a___name=b___dump_index=1.pt", "step=0.json", "model.pt"):
            (experiment.folder / name).touch()
        assert sites(open_dump(experiment.folder)) == ["a:output forward step 0"]

    def test_two_experiments_are_named(self, experiment: Experiment) -> None:
        experiment.add("a")
        Experiment(experiment.folder.with_name("second")).add("a")
        with pytest.raises(DumpError) as caught:
            open_dump(experiment.folder.parent)
        assert str(caught.value) == (
            f"{experiment.folder.parent} holds several experiments; name one of them: run, second"
        )


def write_pass(folder: Path, number: int, table: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"Pass{number:05d}.pt"
    torch.save(table, file)
    return file


class TestHooks:
    """Read the older format: one file per pass, which begins with the logits of the previous pass."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "dumps" / "TP1_PP0_Rank1_pid99"
        batch = {
            "model.forward_batch_info.input_ids": torch.tensor(5.0),
            "model.forward_batch_info.seq_lens": torch.tensor(6.0),
        }
        write_pass(folder, 0, {"model.a": torch.tensor(1.0), **batch})
        second = {
            "model": torch.tensor(2.0),
            "model.pp_proxy_tensors.residual": torch.tensor(3.0),
            "logits_processor": torch.tensor(4.0),
            "model.a": [torch.tensor(7.0), torch.tensor(8.0)],
            **batch,
        }
        write_pass(folder, 1, second)
        return folder

    @pytest.mark.parametrize("part", [".", ".."])
    def test_outputs_after_the_inner_model_belong_to_the_pass_before(
        self, folder: Path, part: str
    ) -> None:
        opened = open_dump(folder / part)
        assert opened.format == "sglang"
        assert values(opened) == {
            "model.a:output forward step 0 rank 1": 1.0,
            "(model):input.input_ids forward step 0 rank 1": 5.0,
            "(model):input.seq_lens forward step 0 rank 1": 6.0,
            "model:output forward step 0 rank 1": 2.0,
            "model:output.residual forward step 0 rank 1": 3.0,
            "logits_processor:output forward step 0 rank 1": 4.0,
            "model.a:output.0 forward step 1 rank 1": 7.0,
            "model.a:output.1 forward step 1 rank 1": 8.0,
            "(model):input.input_ids forward step 1 rank 1": 5.0,
            "(model):input.seq_lens forward step 1 rank 1": 6.0,
        }

    def test_several_processes(self, folder: Path) -> None:
        other = folder.with_name("TP0_PP0_Rank0_pid98")
        write_pass(other, 3, {"model.a": torch.tensor(9.0)})
        assert values(open_dump(folder.parent))["model.a:output forward step 3"] == 9.0

    def test_two_runs_of_one_rank_are_named(self, folder: Path) -> None:
        write_pass(folder.with_name("TP1_PP0_Rank1_pid98"), 0, {"model.a": torch.tensor(9.0)})
        with pytest.raises(
            DumpError, match="several runs of one rank; name one of them: TP1_PP0_R"
        ):
            open_dump(folder.parent)

    def test_file_without_a_table_is_one_error(self, folder: Path) -> None:
        file = write_pass(folder, 2, [torch.zeros(1)])
        opened = open_dump(folder)
        assert opened.problems == [f"{file}: it holds no outputs by module name"]
        assert opened.tensors


class Dangerous:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/never",)


def write_pickle(file: Path) -> None:
    torch.save({"value": Dangerous(), "meta": {}}, file)


def write_truncated(file: Path) -> None:
    torch.save({"value": torch.zeros(1000), "meta": {}}, file)
    file.write_bytes(file.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (write_pickle, "objects other than tensors"),
        (write_truncated, "not a file of torch.save"),
        (lambda file: torch.save({"value": torch.eye(2).to_sparse(), "meta": {}}, file), "sparse"),
        (lambda file: file.write_bytes(b""), "not a file of torch.save"),
        (lambda file: file.write_bytes(b"\xe9" * 100), "not a file of torch.save|objects other"),
        (os.mkfifo, "it is a FIFO, a socket or a device, not a file"),
        (Path.mkdir, "it is a folder, not a file"),
        (lambda file: file.symlink_to("/etc/passwd"), "it lies outside of the dump"),
        (lambda file: file.symlink_to(file), "Symlink loop"),
    ],
    ids=["pickle", "truncated", "sparse", "empty", "latin-1", "fifo", "folder", "link", "loop"],
)
def test_hostile_file_is_one_error(
    experiment: Experiment, write: Callable[[Path], object], problem: str
) -> None:
    file = experiment.folder / "step=0___rank=0___dump_index=1___name=a.pt"
    write(file)
    with pytest.raises(UnreadableFileError, match=problem) as caught:
        open_dump(experiment.folder)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_claim_of_10_gb_is_refused_when_it_is_read(experiment: Experiment) -> None:
    experiment.add("a", torch.zeros(1).expand(2_500_000_000))
    opened = open_dump(experiment.folder)
    assert opened.tensors[0].shape == (2_500_000_000,)
    with pytest.raises(UnreadableFileError, match="more elements than are stored"):
        opened.tensors[0].read()


def test_file_that_changed_is_one_error(experiment: Experiment) -> None:
    file = experiment.add("a", [torch.zeros(1)])
    opened = open_dump(experiment.folder)
    torch.save({"value": [], "meta": {}}, file)
    with pytest.raises(UnreadableFileError, match="is a NoneType, not a tensor"):
        opened.tensors[0].read()


def test_odd_values_are_left_out_or_escaped(experiment: Experiment) -> None:
    circle: list[Any] = []
    circle.append(circle)
    experiment.add("circle", circle)
    experiment.add("meta", meta={"world_rank": "x", "dims": ["b"]}, rank=None)
    experiment.add("keys", {7: torch.tensor(1.0), "a\nb": torch.tensor(2.0), (1,): torch.ones(1)})
    assert sites(open_dump(experiment.folder)) == [
        "meta:output forward step 0",
        "keys:output.7 forward step 0",
        "keys:output.a\\nb forward step 0",
    ]


def test_name_in_latin_1_is_refused(experiment: Experiment) -> None:
    name = os.fsdecode(b"step=0___rank=0___dump_index=1___name=caf\xe9.pt")
    torch.save(torch.zeros(1), experiment.folder / name)
    with pytest.raises(UnreadableFileError, match="its name is not UTF-8"):
        open_dump(experiment.folder)


def test_link_to_an_experiment_elsewhere_is_refused(tmp_path: Path, experiment: Experiment) -> None:
    experiment.add("a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run").symlink_to(experiment.folder)
    with pytest.raises(UnreadableFileError, match="it lies outside of the dump"):
        open_dump(tmp_path / "other")
