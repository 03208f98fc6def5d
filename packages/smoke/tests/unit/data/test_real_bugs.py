"""Known mistakes, each found by the property that it breaks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from assay.plugins import load_object
from assay_smoke.data import accumulation, chats, collating, sampling
from assay_smoke.data.planned_checks import micro_tokenizers
from assay_smoke.data.tokens import micro_tokenizer
from assay_smoke.data.verdict import Subject, SubjectReport

PLANTS = Path(__file__).parents[2] / "data_plants"

Check = Callable[[Subject, Any], SubjectReport]


class Bug(NamedTuple):
    """A known mistake."""

    check: Check
    plant: str
    breaks: str
    """The broken property."""
    words: str
    """Part of the reason."""
    source: str = ""
    """Path on https://github.com/; empty if it was not published as a bug."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chat(subject: Subject, render: Any) -> SubjectReport:
    return chats.check_chat(subject, render, micro_tokenizers())


def chat_labels(subject: Subject, render: Any) -> SubjectReport:
    return chats.check_labels(subject, render, micro_tokenizers())


def padded(subject: Subject, collator: Any) -> SubjectReport:
    tokenizers = [micro_tokenizer("own"), micro_tokenizer("eos")]
    return collating.check_padding(subject, collator, tokenizers)


def packed(subject: Subject, collator: Any) -> SubjectReport:
    return collating.check_packing(subject, collator, [micro_tokenizer("own")])


def sampled(subject: Subject, open_run: Any) -> SubjectReport:
    small = (plan for plan in sampling.SAMPLER_PLANS if plan.num_samples < 20)
    plans = [plan for plan in small if not plan.num_workers]
    return sampling.check_sampling(subject, open_run, plans)


def budgeted(subject: Subject, open_run: Any) -> SubjectReport:
    return sampling.check_sampling(subject, open_run, sampling.BATCH_SAMPLER_PLANS)


def accumulated(subject: Subject, step: Any) -> SubjectReport:
    return accumulation.check_accumulation(subject, step, accumulation.STEPS[1:4])


FILES: dict[Check, str] = {
    chat: "renders.py",
    chat_labels: "renders.py",
    padded: "collators.py",
    packed: "collators.py",
    sampled: "samplers.py",
    budgeted: "samplers.py",
    accumulated: "steps.py",
}

BUGS = [
    Bug(chat, "tokenized_again", chats.ONE_BOS, "begins with 2 tokens '<|bos|>' (256)",
        "sgl-project/sglang/pull/888"),
    Bug(chat, "bos_lost", chats.ONE_BOS, "the template writes BOS",
        "marin-community/marin/pull/7179"),
    Bug(chat, "second_turn_lost", chats.TURNS, "turn 2, 'Blue.' of the assistant"),
    Bug(chat, "never_ended", chats.ENDED, "never learns to stop"),
    Bug(chat, "for_generation", chats.NO_PROMPT, "add_generation_prompt=False"),
    Bug(chat, "with_a_counter", chats.REPEATABLE, "the second call returns different ids"),
    Bug(chat, "first_turns_exchanged", chats.TURNS, "turn 1, 'Blue.' of the assistant, comes before an earlier turn"),
    Bug(chat, "cut_with_an_end", chats.CUT, "a cut chat gets an extra end token"),
    Bug(chat, "cut_too_late", chats.CUT, "86 tokens remain, at most 85 are wanted"),
    Bug(chat, "all_as_the_user", chats.ROLES, "of the assistant begins with '<|im_start|>user'"),
    Bug(chat, "roles_swapped", chats.ROLES, "of the user begins with '<|im_start|>assistant'"),
    Bug(chat_labels, "other_ends_learned", chats.OTHERS, "the end of the user's turn 'Name a colour.', '<|eos|>' (257), has"),
    Bug(chat_labels, "all_learned", chats.OTHERS, "14 tokens of the user's turn 'Name a colour.'"),
    Bug(chat_labels, "header_searched", chats.OTHERS, "tokens of the user's turn 'Repeat <|eos|>",
        "huggingface/trl/issues/1550"),
    Bug(chat_labels, "end_masked", chats.END, "'<|eos|>' (257), has no label",
        "huggingface/trl/issues/976"),
    Bug(chat_labels, "pad_masked", chats.PADDING, "the label of '<|eos|>' (257) is lost",
        "huggingface/transformers/issues/23530"),
    Bug(chat_labels, "first_turn_only", chats.ASSISTANT, "last turn 'Green, then.'"),
    Bug(chat_labels, "first_letter_masked", chats.ASSISTANT, "1 of 5 tokens of the turn 'Blue.'"),
    Bug(chat_labels, "earlier_ends_learned", chats.END, "the end of the turn 'Blue.', '<|eos|>' (257), has a label",
        "hiyouga/LlamaFactory/pull/10827"),
    Bug(chat_labels, "labels_shifted", chats.OWN_ID, "labels are shifted"),
    Bug(chat_labels, "labels_not_cut_along", chats.CUT_LABELS, "labels of the remaining tokens are ids of other tokens",
        "vllm-project/vllm/pull/54539"),
    Bug(padded, "pad_id_masked", collating.LABELS, "the end of the sample, '<|eos|>' (257)",
        "huggingface/transformers/issues/23530"),
    Bug(padded, "mask_from_ids", collating.MASKED, "'<|eos|>' (257) at position 1 is a token",
        "huggingface/trl/issues/884"),
    Bug(padded, "without_mask", collating.MASKED, "padding before tokens, and no attention mask"),
    Bug(padded, "first_row_only", collating.ONE_ROW_EACH, "2 samples make 1 rows",
        "huggingface/transformers/issues/34204"),
    Bug(padded, "one_row_of_all", collating.ONE_ROW_EACH, "2 samples make 1 rows"),
    Bug(padded, "padding_learned", collating.NO_PADDING_LEARNED, "padding has a label at position 2"),
    Bug(padded, "filled_from_another_sample", collating.NO_PADDING_LEARNED, "padding has a label"),
    Bug(padded, "prompt_learned", collating.LABELS, "has a label, but its sample has none"),
    Bug(padded, "shifted", collating.LABELS, "labels are shifted"),
    Bug(padded, "shifted_to_the_right", collating.LABELS,
        "has no label: a model never learns to stop, unless labels are shifted to the right"),
    Bug(padded, "first_row_again", collating.ONE_ROW_EACH, "around it: row 1 holds sample 0 again"),
    Bug(padded, "labels_on_the_right", collating.LABELS, "labels are padded on the right"),
    Bug(padded, "last_token_cut", collating.ONE_ROW_EACH, "no row of the batch holds sample 0"),
    Bug(padded, "positions_of_the_row", collating.ROW_POSITIONS, "of sample 0 begin with 1 instead of 0",
        "unslothai/unsloth/issues/3699"),
    Bug(padded, "positions_not_padded", collating.ROW_POSITIONS, "position_ids has 2 positions, and input_ids 8",
        "hiyouga/LlamaFactory/pull/10737"),
    Bug(padded, "masked_by_another_pad", collating.MASKED, "at position 2 is padding, but is not masked",
        "OpenGVLab/InternVL/issues/967"),
    Bug(padded, "inputs_and_targets", collating.ONE_ROW_EACH, "token 1 of sample 0, '<|eos|>' (257), is lost",
        "pytorch/torchtitan/issues/3130"),
    Bug(padded, "samples_extended", collating.UNCHANGED, "at position 2 is padding, but is not masked"),
    Bug(packed, "packed_with_mask_of_ones", collating.ISOLATED, "the logits of sample 1 in the pack and alone differ",
        "axolotl-ai-cloud/axolotl/pull/3796"),
    Bug(packed, "packed_with_causal_mask_alone", collating.ISOLATED, "attention sdpa): it sees other samples by attention"),
    Bug(packed, "packed_counting_on", collating.PACKED_POSITIONS, "sample 1 begin with 3 instead of 0",
        "huggingface/nanoVLM/pull/204"),
    Bug(packed, "packed_counting_from_one", collating.PACKED_POSITIONS, "sample 0 begin with 1 instead of 0"),
    Bug(packed, "packed_cut_at_120", collating.WHOLE, "token 90 of sample 1, "),
    Bug(packed, "packed_without_positions", collating.PACKED_POSITIONS, "the batch lacks position ids"),
    Bug(packed, "packed_without_positions", collating.ISOLATED, "the logits of sample 1 in the pack and alone differ"),
    Bug(packed, "packed_over_the_seam", collating.SEAM, "the first token of sample 1, has a label"),
    Bug(packed, "packed_without_last_tokens", collating.WHOLE, "'<|eos|>' (257), is lost"),
    Bug(packed, "packed_with_a_token_twice", collating.WHOLE, "appears 2 times"),
    Bug(packed, "packed_with_prompts", collating.LABELS, "has a label, but its sample has none"),
    Bug(packed, "packed_with_eos_masked", collating.LABELS, "the end of the sample, '<|eos|>' (257), has no label"),
    Bug(packed, "packed_positions_not_filled", collating.PACKED_POSITIONS, "position_ids has 3 positions, and input_ids 8",
        "hiyouga/LlamaFactory/pull/10737"),
    Bug(packed, "packed_ranges_summed", collating.LABELS, "the end of the sample, '<|eos|>' (257), has no label",
        "OpenRLHF/OpenRLHF/pull/781"),
    Bug(packed, "packed_with_learned_fill", collating.LABELS, "belongs to no sample, but has a label"),
    Bug(sampled, "epoch_lost_by_resume", sampling.RESUMED,
        "resumed in epoch 1 has the order of epoch 0 in epoch 1",
        "huggingface/transformers/pull/40691"),
    Bug(sampled, "epochs_counted_from_the_resume", sampling.RESUMED,
        "a run resumed in epoch 1 makes more epochs than are left"),
    Bug(sampled, "epoch_not_restored", sampling.RESUMED,
        "a run resumed in epoch 1 starts again at epoch 0"),
    Bug(sampled, "last_epoch_lost_by_resume", sampling.RESUMED,
        "a run resumed in epoch 1 makes fewer epochs than are left"),
    Bug(sampled, "offset_kept", sampling.RESUMED, "also skips 6 batches of epoch 1",
        "NVIDIA-NeMo/Megatron-Bridge/pull/4601"),
    Bug(sampled, "global_generator", sampling.RESUMED, "in epoch 0",
        "wyim-pgl/transgenic/issues/59"),
    Bug(sampled, "begun_again", sampling.RESUMED, "restarts the epoch"),
    Bug(sampled, "one_batch_again", sampling.RESUMED, "resumed in epoch 0 repeats 1 batch"),
    Bug(sampled, "one_batch_too_far", sampling.RESUMED, "never",
        "huggingface/accelerate/issues/2823"),
    Bug(sampled, "every_rank_all", sampling.ONCE, "(sample 0 by rank 0, 1)",
        "huggingface/datasets/issues/5360"),
    Bug(sampled, "own_seed_on_each_rank", sampling.ONCE, "never seen"),
    Bug(sampled, "set_epoch_forgotten", sampling.NEW_ORDER, "epoch 1 has the order of epoch 0"),
    Bug(sampled, "seed_times_epoch", sampling.NEW_ORDER, "with seed 0, but not with seed 1"),
    Bug(sampled, "dropped_undeclared", sampling.ONCE,
        "never seen: as many as the incomplete last batch has, although drop_last is not set"),
    Bug(sampled, "repeated_though_dropping", sampling.ONCE, "seen more than once"),
    Bug(sampled, "uneven_ranks", sampling.EQUAL_STEPS, "the ranks make 7, 6 steps"),
    Bug(sampled, "strided_before_it_is_cut", sampling.EQUAL_STEPS, "the ranks make 7, 6 steps",
        "NVIDIA-NeMo/Megatron-Bridge/pull/5944"),
    Bug(sampled, "sample_lost_for_another", sampling.ONCE, "never seen"),
    Bug(sampled, "workers_of_rank_0", sampling.RESUMED, "sees other samples in epoch",
        "PrimeIntellect-ai/prime-rl/pull/1035"),
    Bug(sampled, "seeded_by_the_run", sampling.REPEATABLE, "two runs with seed 0 differ"),
    Bug(sampled, "batch_of_all_ranks", sampling.BATCH_SIZE, "2 samples instead of 1"),
    Bug(sampled, "seed_ignored", sampling.SEEDED, "seeds 0 and 1 give the same order"),
    Bug(budgeted, "budget_by_rank", sampling.EQUAL_STEPS, "steps: the first collective"),
    Bug(budgeted, "budget_overrun", sampling.BATCH_SIZE, "tokens"),
    Bug(budgeted, "budget_leftover_lost", sampling.ONCE, "never seen"),
    Bug(budgeted, "two_rounds_dropped", sampling.ONCE, "drop_last may leave out 128 tokens here"),
    Bug(accumulated, "mean_of_means", accumulation.SAME_GRADIENT,
        "it is the mean of the micro-batches' own means",
        "huggingface/transformers/issues/24725"),
    Bug(accumulated, "mean_of_ranks", accumulation.SAME_GRADIENT, "own means"),
    Bug(accumulated, "summed_means", accumulation.SAME_GRADIENT, "not divided by their number"),
    Bug(accumulated, "first_labels_counted", accumulation.SAME_GRADIENT, "divided by all labels"),
    Bug(accumulated, "averaged_once_more", accumulation.SAME_GRADIENT, "0.5 times the right one"),
    Bug(accumulated, "divided_by_the_full_number", accumulation.SAME_GRADIENT, "0.5 times the right one",
        "huggingface/transformers/pull/39659"),
    Bug(accumulated, "last_only", accumulation.SAME_GRADIENT, "right ones: 0, 2 on rank 0"),
    Bug(accumulated, "mean_of_means_in_bfloat16", accumulation.SAME_GRADIENT,
        "3x the rounding of one big batch in torch.bfloat16): it is the mean of the micro-batches' own means"),
    Bug(accumulated, "first_labels_counted_in_bfloat16", accumulation.SAME_GRADIENT, "divided by all labels"),
    Bug(accumulated, "last_only_in_bfloat16", accumulation.SAME_GRADIENT, "right ones: 0, 2 on rank 0"),
    Bug(accumulated, "without_the_head", accumulation.SAME_GRADIENT, "it is missing or zero for lm_head.weight"),
    Bug(accumulated, "clipped", accumulation.SAME_GRADIENT, "and its norm is 0.25"),
    Bug(accumulated, "first_lost", accumulation.SAME_GRADIENT, "right ones: 0, 1 on rank 0"),
]  # fmt: skip

RIGHT = [
    (chat, "right"),
    (chat, "keeping_the_end"),
    (chat, "dropping"),
    (chat_labels, "right"),
    (chat_labels, "keeping_the_end"),
    (chat_labels, "dropping"),
    (chat_labels, "last_turn_only"),
    (padded, "right_padded"),
    (padded, "first_label_masked"),
    (packed, "right_packed"),
    (packed, "packed_in_two_rows"),
    (packed, "packed_with_mask_for_sdpa"),
    (sampled, "right"),
    (sampled, "Stateful"),
    (budgeted, "right_budget"),
    (budgeted, "large_batches_dropped"),
    (accumulated, "right"),
    (accumulated, "right_in_bfloat16"),
    (accumulated, "right_in_float16"),
    (accumulated, "right_on_a_narrow_copy"),
]


def report_on(check: Check, plant: str) -> SubjectReport:
    return check(Subject(plant), load_object(f"{PLANTS / FILES[check]}:{plant}"))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.plant}-{bug.check.__name__}")
def test_a_known_mistake_is_found_by_the_property_it_breaks(bug: Bug) -> None:
    findings = {finding.name: finding for finding in report_on(bug.check, bug.plant).findings}
    assert bug.breaks in findings, list(findings)
    found = findings[bug.breaks]
    assert bug.words in found.reason
    assert found.example
    assert 0 < found.failed <= found.cases


@pytest.mark.parametrize(
    ("check", "plant"), RIGHT, ids=lambda value: getattr(value, "__name__", value)
)
def test_what_is_right_has_no_finding_and_every_property_tried(check: Check, plant: str) -> None:
    report = report_on(check, plant)
    assert report.findings == []
    assert report.untried == []
    assert report.compared > 5


@pytest.mark.parametrize("check", [chat, chat_labels])
def test_texts_that_change_are_not_blamed_on_a_cut_or_the_pad_token(check: Check) -> None:
    found = {finding.name for finding in report_on(check, "with_a_counter").findings}
    assert found <= {chats.REPEATABLE}


def test_every_property_has_a_mistake_that_breaks_it() -> None:
    promised = {
        *chats.CHAT_PROPERTIES,
        *chats.LABEL_PROPERTIES,
        *collating.PADDING_PROPERTIES,
        *collating.PACKING_PROPERTIES,
        *sampling.PROPERTIES,
        accumulation.SAME_GRADIENT,
    }
    assert promised == {bug.breaks for bug in BUGS}
