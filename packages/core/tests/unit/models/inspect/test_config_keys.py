"""Keys of config.json that no code reads are named, with the nearest that is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from assay.models import RECIPES, load_model
from assay.models.inspect.config_keys import ConfigReads, KeyReader, inert_keys
from assay.models.inspect.inspection import inspect_load

EditConfig = Callable[..., None]


def unread(folder: Path) -> list[tuple[str, str, str | None]]:
    report = inspect_load(load_model(str(folder), dtype="float32"), "refuse").report
    return [(key.key, key.problem, key.nearest or key.used) for key in report.keys]


def gemma_with(folder: Path, **changes: Any) -> Path:
    """micro:gemma2 with other keys in its config.json; None drops one."""
    shutil.copytree(RECIPES["gemma2"].folder, folder)
    path = folder / "config.json"
    record = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in record.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return folder


def test_misspelt_soft_cap_is_named_with_the_key_that_was_meant(tmp_path: Path) -> None:
    folder = gemma_with(
        tmp_path / "gemma2", attn_logit_softcapping=None, attn_logit_softcaping=10.0
    )
    assert unread(folder) == [("attn_logit_softcaping", "misspelt", "attn_logit_softcapping")]


def test_stray_key_beside_the_right_one_is_only_unread(tmp_path: Path) -> None:
    folder = gemma_with(tmp_path / "gemma2", attn_logit_softcaping=10.0)
    assert unread(folder) == [("attn_logit_softcaping", "unread", "attn_logit_softcapping")]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"rope_theta": 5e5, "rope_parameters": None}, []),  # the older name, which is read
        ({"rope_params": {"rope_theta": 5e5, "rope_type": "default"}, "rope_parameters": None},
         [("rope_params", "misspelt", "rope_parameters")]),
        ({"rotary_emb_base": 5e5, "rope_parameters": None}, [("rotary_emb_base", "unread", None)]),
        ({"rope_parameters": {"rope_type": "default", "theta": 5e5}},
         [("rope_parameters.theta", "unread", "rope_theta")]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, []),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0, "rope_theta": 1e4}},
         [("rope_parameters.factor", "unread", None)]),
        ({"norm_topk_prob": True}, [("norm_topk_prob", "unread", None)]),
        ({"rope_theta": 5e5}, [("rope_theta", "overridden", "10000.0")]),  # beside rope_parameters
    ],
)  # fmt: skip
def test_rotary_and_other_keys_of_llama(
    llama_folder: Path, settings: dict[str, Any], found: list[tuple[str, str, str | None]]
) -> None:
    path = llama_folder / "config.json"
    record = json.loads(path.read_text(encoding="utf-8")) | settings
    kept = {key: value for key, value in record.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")

    assert unread(llama_folder) == found


def test_rotary_parameter_that_the_configuration_class_changes_is_named_with_both_values(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LlamaConfig.__init__

    def read_and_change(self: Any, *arguments: Any, **settings: Any) -> None:
        read(self, *arguments, **settings)
        self.rope_parameters["rope_theta"] = 5e5

    monkeypatch.setattr(LlamaConfig, "__init__", read_and_change)

    report = inspect_load(load_model(str(llama_folder), dtype="float32"), "refuse").report

    (found,) = report.keys
    assert (found.key, found.problem) == ("rope_parameters.rope_theta", "overridden")
    assert (found.used, found.stored) == ("500000.0", "10000.0")


def test_key_that_the_code_looks_for_elsewhere_is_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frequencies(config: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, float]:
        theta = getattr(config, "rope_theta", 10000.0)  # where older versions had it
        return theta ** -(torch.arange(4) / 4), 1.0

    rotary = modeling_llama.LlamaRotaryEmbedding
    monkeypatch.setattr(rotary, "compute_default_rope_parameters", staticmethod(frequencies))
    assert unread(llama_folder) == [("rope_parameters.rope_theta", "misplaced", "rope_theta")]


class ByLayer(LlamaConfig):
    """Refuses the size of a head, which each layer has its own of, as the configuration of Gemma 4 Unified."""

    is_built = False

    def __getattribute__(self, key: str) -> Any:
        if key == "head_dim" and ByLayer.is_built:
            raise ValueError("head_dim may vary across layers")
        return super().__getattribute__(key)  # type: ignore[no-untyped-call]


def test_key_that_a_configuration_refuses_to_give_is_neither_unread_nor_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = KeyReader(ConfigReads(), modeling_llama.LlamaForCausalLM)
    raw = {"head_dim": 16, "rms_norm_eps": 1e-5}
    config = ByLayer(rms_norm_eps=1e-5)
    monkeypatch.setattr(ByLayer, "is_built", True)
    keys, num_keys = reader.find_unread(raw, config)
    assert "head_dim" not in [key.key for key in keys]
    assert num_keys == 1


def test_each_inert_key_has_its_reason() -> None:
    assert all(len(reason) > 10 for reason in inert_keys().values())
    assert not {"norm_topk_prob", "rope_theta", "sliding_window"} & inert_keys().keys()
