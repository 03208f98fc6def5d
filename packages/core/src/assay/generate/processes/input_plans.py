"""Plans the batches of a golden from its options."""

from dataclasses import replace
from pathlib import Path

from assay.errors import UsageError, name_some
from assay.generate.passes.generation_loop import limits_of_generation
from assay.generate.processes.requests import InputOptions
from assay.inputs import (
    BatchOptions,
    InputPlan,
    describe_hard_cases,
    load_prompts,
    parse_lengths,
    plan_batches,
)
from assay.models import LoadedModel


def plan_inputs(options: InputOptions, loaded: LoadedModel) -> InputPlan:
    """Plan the batches that `options` ask for."""
    limits = limits_of_generation(loaded)
    prompts = None
    if options.chat and loaded.encode_chat is None:
        raise UsageError(f"--chat: {loaded.source.reference} has no chat template")
    if options.prompts is not None:
        prompts = load_prompts(
            Path(options.prompts),
            loaded.encode,
            limits,
            max_new_tokens=options.max_new_tokens,
            encode_chat=loaded.encode_chat if options.chat else None,
        )
    lengths = parse_lengths(options.prompt_length) if options.prompt_length else None
    plan_options = BatchOptions(
        lengths=lengths,
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )
    plan = plan_batches(limits, plan_options, loaded.encode, prompts)
    missed = [
        name for name, met in describe_hard_cases(plan.batches, limits).items() if met is False
    ]
    notes = [f"these inputs do not try: {', '.join(missed)}"] if missed else []
    notes += _notes_on_double_bos(plan, getattr(loaded.config, "bos_token_id", None))
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def _notes_on_double_bos(plan: InputPlan, bos_token_id: object) -> list[str]:
    """Note prompts that begin with two BOS tokens: the tokenizer added one to a chat template's."""
    twice = sorted(
        number
        for batch in plan.batches
        for number, row in zip(batch.prompts, batch.rows, strict=True)
        if bos_token_id is not None and list(row[:2]) == [bos_token_id, bos_token_id]
    )
    if not twice:
        return []
    prompts = name_some([f"prompt {number}" for number in twice])
    return [f"two BOS tokens (id {bos_token_id}) at the beginning of {prompts}"]
