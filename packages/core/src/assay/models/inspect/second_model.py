"""Compare the loaded model with a second one: loaded again, or built from its configuration alone.

The second load has another seed, NaN in uninitialized memory, and placeholders for stored tensors, which
were compared with the files already. The tensors that the model's code computes must be bitwise equal to
those of the first load. A loader, or a patch of one, may change buffers, settings and modules of every
model that it loads, and a second load repeats the change. A model built without a loader does not have it.
"""

# ruff: noqa: ANN401 - objects of transformers

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from assay.models.config_files import attentions_of
from assay.models.inspect.report import LoadReport
from assay.models.inspect.weights import Inspection, all_tensors, measure_difference
from assay.models.stored_tensors import same_bits

_OTHER_SEED = 0x5EED


def load_again(model: Any, config: Any, inspection: Inspection, dtype: torch.dtype) -> nn.Module:
    """Load another model of the same class, with placeholders for the tensors that its files hold.

    config: a new configuration from the same config.json, without quantization.
    Raises: any exception of the loader.
    """
    # Not `state_dict`, in which bitsandbytes 0.50 changes weights after the first call.
    held = {name: one for name, one in all_tensors(model) if name in inspection.sources}
    for path in inspection.quantized:
        module = model.get_submodule(path)
        size = getattr(module, "out_features", 0), getattr(module, "in_features", 0)
        if all(size):
            held[f"{path}.weight"] = torch.empty(size, dtype=dtype, device="meta")

    def load(placeholder: Callable[[Tensor], Tensor]) -> nn.Module:
        state = {name: placeholder(one) for name, one in held.items()}
        again: nn.Module = type(model).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attentions_of(model.config),
        )
        return again.eval()

    with other_random_numbers(), _dirty_memory():
        try:
            return load(lambda tensor: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
        except RuntimeError:
            # Code that writes into loaded tensors needs real memory.
            return load(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))


def compare_made(
    made: dict[str, Tensor], again: nn.Module, dtype: torch.dtype, report: LoadReport
) -> None:
    """Compare the tensors that the first load computed with the second load's; add to `report`."""
    second = {
        name: tensor.detach().cpu() for name, tensor in all_tensors(again) if not tensor.is_meta
    }
    for name, tensor in made.items():
        other = second.get(name)
        if other is None or other.shape != tensor.shape:
            report.not_compared.append(f"{name} (a second load has no such tensor)")
            continue
        report.compared += 1
        found = measure_difference(name, tensor, other.to(tensor.dtype), dtype, "varies")
        report.weights += [found] if found is not None else []


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Seed every generator of the host differently inside this context, and restore them on exit."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one
    with torch.random.fork_rng(devices=[]):
        random.seed(_OTHER_SEED)
        np.random.seed(_OTHER_SEED)  # noqa: NPY002 - model code draws from it
        torch.manual_seed(_OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002 - as above


@contextmanager
def _dirty_memory() -> Iterator[None]:
    """Make torch fill uninitialized memory with NaN or the largest integer inside this context."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        settings.fill_uninitialized_memory = filled


BuildModel = Callable[[torch.dtype], nn.Module]

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype)
# Keys of a configuration that do not affect the computation. The run sets `dtype`.
_IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype"})
# Attributes of a module that do not affect the computation. The check sets `training`, a loader that
# dequantized `is_quantized`.
_IGNORED_ATTRIBUTES = frozenset(
    {
        "name_or_path",
        "training",
        "is_quantized",
        # transformers drops a pair of weights that the files hold with different values.
        "all_tied_weights_keys",
    }
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def build_from_config(model: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Build a second model of the same class, with real buffers and with parameters on meta.

    config: a new configuration from the same config.json.
    Raises: any exception of the class.
    """
    from transformers.initialization import no_init_weights

    attention = attentions_of(model.config)
    with other_random_numbers(), no_init_weights(), _parameters_without_memory():
        built: nn.Module = type(model)._from_config(  # noqa: SLF001 - from_config of auto classes
            config, dtype=dtype, attn_implementation=attention
        )
    return built.eval()


def compare_with_built(
    model: nn.Module, made: Mapping[str, Tensor], build: BuildModel, dtype: torch.dtype
) -> LoadReport:
    """Compare settings, modules and the tensors that no file holds with those of a built model.

    made: the tensors that no file holds.
    dtype: the dtype of the load.
    Returns: a report with `weights`, `not_compared` and `settings` alone.
    """
    built = build(dtype)
    result = LoadReport(settings=list(_other_settings(model, built)))
    expected = {name: tensor.detach() for name, tensor in all_tensors(built)}
    different = []
    for name, tensor in made.items():
        other = expected.get(name)
        if other is None or other.shape != tensor.shape:
            result.not_compared.append(f"{name} (its class does not make it from config.json)")
        elif not other.is_meta and not same_bits(tensor, other):
            different.append(name)
    wide = _made_in_float32(different, build, dtype)
    for name in different:
        actual, other = made[name], expected[name]
        rounded = wide[name].to(other.dtype) if name in wide else other
        if same_bits(actual, rounded):
            continue
        found = measure_difference(name, actual, other, dtype, "not-built")
        result.weights += [found] if found is not None else []
    return result


def _made_in_float32(
    names: list[str], build: BuildModel, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Build the model in float32, and return the named tensors.

    A class may compute them in the model's dtype, while loading recomputes some in float32 (the
    sinusoids of GPT-J).
    """
    if not names or dtype is torch.float32:
        return {}
    return {name: tensor for name, tensor in all_tensors(build(torch.float32)) if name in names}


def _other_settings(model: nn.Module, built: nn.Module) -> Iterator[str]:
    """Describe differences in modules, their plain attributes and configurations."""
    expected = dict(built.named_modules())
    configs: set[tuple[int, int]] = set()
    for path, module in model.named_modules():
        name = path or "(model)"
        other = expected.pop(path, None)
        if other is None:
            yield f"{name} is a module that its class does not make from config.json"
            continue
        # Each parametrized module, such as one with weight norm, has a class of its own.
        own_class, other_class = (type_before_parametrizations(one) for one in (module, other))
        if own_class is not other_class or is_parametrized(module) != is_parametrized(other):
            yield f"{name} is a {type(module).__name__}, not a {type(other).__name__}"
            continue
        yield from _differences(f"{path}." if path else "", _settings(module), _settings(other))
        own: Any = getattr(module, "config", None)
        theirs: Any = getattr(other, "config", None)
        if (id(own), id(theirs)) in configs or not hasattr(own, "to_dict"):
            continue
        configs.add((id(own), id(theirs)))
        yield from _differences(f"{name}.config.", _keys(own.to_dict()), _keys(theirs.to_dict()))
    yield from (f"{path} is missing, a module of its class" for path in expected)


def _differences(
    prefix: str, loaded: Mapping[str, object], built: Mapping[str, object]
) -> Iterator[str]:
    for key in sorted(loaded.keys() | built.keys()):
        actual, expected = loaded.get(key, "absent"), built.get(key, "absent")
        # Compared as text, so that NaN equals itself and True differs from 1.
        if repr(actual) != repr(expected):
            where = "where its class is built from config.json alone"
            yield f"{prefix}{key} is {actual}, {expected} {where}"


def _settings(module: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {
        key: getattr(value, "__qualname__", value)
        for key, value in vars(module).items()
        if not key.startswith("_")
        and key not in _IGNORED_ATTRIBUTES
        and (_is_plain(value) or (callable(value) and not isinstance(value, nn.Module)))
    }
    return found | {key: len(vars(module)[key]) for key in _HOOKS}


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _CONSTANTS)


def _keys(settings: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": item for inner, item in _keys(value).items()}
        elif key not in _IGNORED_KEYS:
            found[key] = value
    return found


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it inside this context."""
    module_class: Any = nn.Module
    register = module_class.register_parameter

    def register_on_meta(module: Any, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    module_class.register_parameter = register_on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register
