import pytest

from assay.sites import Call, CallSite, RowMap, Site, unwrapped_path


@pytest.mark.parametrize(
    ("wrapped", "expected"),
    [
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
        ("", ""),
        ("_orig_mod", ""),
        ("_orig_mod.model.layers.0", "model.layers.0"),
        ("model.layers.0._orig_mod.mlp", "model.layers.0.mlp"),
        ("model.layers.0._orig_mod", "model.layers.0"),
        ("module", ""),
        ("module.model.norm", "model.norm"),
        ("module.module.model.norm", "model.norm"),
        ("_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp", "model.layers.1.mlp"),
        ("model.layers.1._checkpoint_wrapped_module.mlp", "model.layers.1.mlp"),
        ("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp", "model.layers.0.mlp"),
        ("base_model.model.model.layers.0.mlp", "model.layers.0.mlp"),
        ("module.base_model.model.model.layers.0.mlp", "model.layers.0.mlp"),
        ("base_model", ""),
        ("base_model.model", ""),
        ("module.base_model.model", ""),
    ],
)
def test_wrappers_leave_no_trace_in_a_path(wrapped: str, expected: str) -> None:
    assert unwrapped_path(wrapped) == expected


@pytest.mark.parametrize(
    "path",
    ["modules.0", "model.module_list.0", "model.my_orig_mod.x", "model.module.x", "base_models.x"],
)
def test_names_that_only_resemble_wrappers_are_kept(path: str) -> None:
    assert unwrapped_path(path) == path


def test_site_text_omits_defaults() -> None:
    plain = Site(CallSite(0, "model.norm"), "output")
    full = Site(
        CallSite(3, "", call=1, phase="inputs", micro_batch=2, rank=1), "input.position_ids"
    )

    assert str(plain) == "model.norm:output forward step 0"
    assert str(full) == "(model):input.position_ids inputs step 3 call 1 micro-batch 2 rank 1"


def test_sites_are_keys_and_sort_by_step_first() -> None:
    early, late = CallSite(0, "z"), CallSite(1, "a")

    assert sorted([late, early]) == [early, late]
    assert {early: 1}[CallSite(0, "z")] == 1


def test_empty_row_map_has_a_shape() -> None:
    rows = RowMap((4, 7), ((-1, 0, 1), (0, 1, 2)))

    assert (rows.num_rows, rows.length) == (2, 3)
    assert (RowMap((), ()).num_rows, RowMap((), ()).length) == (0, 0)


def test_call_has_no_ports_and_whole_tensors_by_default() -> None:
    call = Call(CallSite(0, "m"), "Linear", None, 0)

    assert call.ports == ()
    assert dict(call.placements) == {}


def test_a_list_of_whole_numbers_may_be_the_sizes_of_groups_of_rows() -> None:
    constants = {"input.sizes.0": 3, "input.sizes.1": 5, "input.flag.0": True, "input.top_k": 2}
    call = Call(CallSite(0, "m"), "Experts", None, 0, constants=constants)

    assert call.group_totals == {8}
