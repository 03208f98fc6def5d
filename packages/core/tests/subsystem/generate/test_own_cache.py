"""A cache of a class of the model's own code: its length, its layers and their parts are compared."""

from collections.abc import Callable

import pytest

from packages.core.tests.subsystem.commands import Finished, run_in_process
from packages.core.tests.subsystem.generate.own_cache_model import save_model_with_mean_keys

pytestmark = pytest.mark.long

RunCandidate = Callable[[str], Finished]

ATTENTION = "model.layers.1.self_attn"
PORT = "changed.past_key_values.1"
PARTS = {
    (f"model.layers.{layer}.self_attn", f"changed.past_key_values.{layer}.{part}")
    for layer in (0, 1)
    for part in ("keys", "values", "mean_keys")
}

# Each changes what a call of the second layer leaves in the cache.
SETUPS = f"""
def _change(model, change):
    attention = model.get_submodule("{ATTENTION}")
    forward = attention.forward
    def changed(*args, past_key_values, **kwargs):
        output = forward(*args, past_key_values=past_key_values, **kwargs)
        change(past_key_values.layers[1])
        return output
    attention.forward = changed


def same(model):
    _change(model, lambda layer: None)


def state_102(model):
    def change(layer):
        layer.mean_keys = layer.mean_keys * 1.02
    _change(model, change)


def state_102_in_place(model):
    _change(model, lambda layer: layer.mean_keys.mul_(1.02))


def last_token_twice(model):
    _change(model, lambda layer: layer.update(layer.keys[..., -1:, :], layer.values[..., -1:, :]))


def no_state(model):
    def change(layer):
        layer.mean_keys = None
    _change(model, change)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunCandidate:
    """Check a candidate in bfloat16 after a setup function, against one golden."""
    folder = tmp_path_factory.mktemp("own-cache")
    model = save_model_with_mean_keys(folder / "model")
    setups = folder / "setups.py"
    setups.write_text(SETUPS)
    captured = run_in_process(
        folder / "golden", "capture", model, "--run", "cpu/float32", "--noise-for", "bfloat16",
        "--max-new-tokens", "3", "--prompt-length", "8:24", "--trust-remote-code",
    )  # fmt: skip
    assert captured.code == 0, captured.stderr

    def run(setup: str) -> Finished:
        return run_in_process(
            folder / setup, "check", "generate", model, "--golden", folder / "golden",
            "--candidate", "cpu/bfloat16", "--candidate-setup", f"{setups}:{setup}",
            "--trust-remote-code",
        )  # fmt: skip

    return run


def test_length_layers_and_parts_of_a_healthy_cache_are_compared(run: RunCandidate) -> None:
    same = run("same")

    assert same.code == 0, same.stdout
    assert same.verdict["unmatched"]["expected"] == []
    assert same.verdict["coverage"]["cache_slots"] > 0
    rows = [(row["module"], row["port"]) for row in same.measurements]
    assert {row for row in rows if str(row[1]).startswith("changed.")} == PARTS


@pytest.mark.parametrize("setup", ["state_102", "state_102_in_place"])
def test_state_that_is_too_large_fails_at_its_module(run: RunCandidate, setup: str) -> None:
    failed = run(setup)

    assert (failed.code, failed.verdict["verdict"]) == (1, "FAIL")
    assert failed.verdict["location"]["module"] == ATTENTION
    assert [item["location"]["module"] for item in failed.verdict["suspects"]] == [ATTENTION]
    rows = [row for row in failed.measurements if row["level"] == "modules" and row["limit"]]
    ports = {row["port"] for row in rows if float(row["ratio"]) > row["limit"]}
    assert ports == {f"{PORT}.mean_keys"}


def test_token_that_is_added_twice_fails_at_its_module(run: RunCandidate) -> None:
    failed = run("last_token_twice")

    assert failed.code == 1
    assert failed.verdict["location"]["module"] == ATTENTION
    assert f"{PORT}.keys" in failed.stdout


def test_layer_without_its_state_does_not_pass(run: RunCandidate) -> None:
    failed = run("no_state")

    assert failed.code == 1
    assert f"{ATTENTION}:{PORT}.mean_keys" in failed.verdict["unmatched"]["expected"]
