"""Observing and replacing the choice of experts."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack

from assay.hooks.expert_choices import ChoiceTracer, ExpertChoice, find_choice_arguments

NUM_EXPERTS = 4


class Experts(nn.Module):
    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return tokens.sum(-1, keepdim=True) * indices * weights


class Block(nn.Module):
    """Chooses two of four experts in its own code, after a selection of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, input_ids: Tensor) -> Any:
        tokens = input_ids.float()
        scores = self.gate(tokens).sigmoid()
        torch.topk(scores[:, :2], 1)
        weights, indices = scores.topk(k=2, dim=-1)
        return self.experts(tokens, indices, weights=weights)


@dataclass
class Watch:
    answer: tuple[Tensor, Tensor] | None = None
    seen: list[ExpertChoice] = field(default_factory=list)

    def choose(self, choice: ExpertChoice) -> tuple[Tensor, Tensor] | None:
        self.seen.append(choice)
        return self.answer


IDS = torch.arange(24).reshape(3, 8) % 5


def test_choice_has_the_scores_of_its_selections() -> None:
    watch, block = Watch(), Block()

    with ChoiceTracer(watch.choose).attached(block), torch.no_grad():
        block(IDS)
        block(IDS)

    first, second = watch.seen
    assert (first.module, first.step, first.call) == ("experts", 0, 0)
    assert second.step == 1
    assert [item.count for item in first.selections] == [1, 2]
    scores = block.gate(IDS.float()).sigmoid()
    assert torch.equal(first.selections[1].scores, scores)
    assert torch.equal(first.indices, scores.topk(2).indices)


def test_scores_of_each_token_of_each_row_are_scores_of_tokens() -> None:
    class Deep(Block):
        def forward(self, input_ids: Tensor) -> Any:
            tokens = input_ids.float()
            weights, indices = self.gate(tokens[None]).topk(2)
            return self.experts(tokens, indices[0], weights=weights[0])

    watch, block = Watch(), Deep()

    with ChoiceTracer(watch.choose).attached(block), torch.no_grad():
        block(IDS)

    (selection,) = watch.seen[0].selections
    assert torch.equal(selection.scores, block.gate(IDS.float()))


def test_experts_get_the_handler_s_choice() -> None:
    block = Block()
    indices, weights = torch.full((3, 2), 3), torch.ones(3, 2)

    with ChoiceTracer(Watch((indices, weights)).choose, frozenset({"experts"})).attached(block):
        changed = block(IDS)

    assert torch.equal(changed, block.experts(IDS.float(), indices, weights))
    assert not torch.equal(changed, block(IDS))


class CountedExperts(Experts):
    num_experts = NUM_EXPERTS


class LateBlock(Block):
    """Calls its experts only from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = CountedExperts()
        self.num_calls = 0

    def forward(self, input_ids: Tensor) -> Any:
        self.num_calls += 1
        return super().forward(input_ids) if self.num_calls > 1 else input_ids


class WeightedExperts(nn.Module):
    """Compute all experts for all tokens, which are zero where an expert is not chosen, as Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(NUM_EXPERTS, 8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.bmm(tokens.view(NUM_EXPERTS, -1, 8), self.weight).sum(0)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, NUM_EXPERTS)
        self.experts = WeightedExperts()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.router(tokens)
        values, indices = torch.topk(logits, 2, dim=1)
        scores = torch.full_like(logits, -torch.inf).scatter(1, indices, values).sigmoid()
        result: Tensor = self.experts((tokens * scores.T[..., None]).flatten(0, 1))
        return result


class WeightedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weighted() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.float()
        tokens[:, :NUM_EXPERTS].topk(1)  # of no router
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        return tokens


def test_choice_for_experts_that_get_tokens_alone_is_that_of_their_router() -> None:
    watch, model = Watch(), WeightedModel()

    with ChoiceTracer(watch.choose).attached(model), torch.no_grad():
        expected = model(IDS)
        model(IDS)

    places = [(one.module, one.step, one.call) for one in watch.seen]
    assert places == [(f"layers.{n}.experts", step, 0) for step in (0, 1) for n in (0, 1)]
    scores = model.get_submodule("layers.0.router")(IDS.float())
    (selection,) = watch.seen[0].selections
    assert torch.equal(selection.scores, scores)
    assert torch.equal(watch.seen[0].indices, scores.topk(2).indices)
    assert torch.equal(model(IDS), expected)


def test_router_of_experts_that_get_tokens_alone_returns_the_handler_s_choice() -> None:
    model, modules = WeightedModel(), frozenset({"layers.0.experts"})
    indices, values = torch.tensor([[0, 1]] * 3), torch.zeros(3, 2)

    with ChoiceTracer(Watch((indices, values)).choose, modules).attached(model), torch.no_grad():
        changed = model(IDS)

    tokens = IDS.float()
    halves = torch.zeros(3, NUM_EXPERTS).scatter(1, indices, 0.5)
    weighted = (tokens * halves.T[..., None]).flatten(0, 1)
    tokens = tokens + model.get_submodule("layers.0.experts")(weighted)
    assert torch.equal(changed, tokens + model.get_submodule("layers.1")(tokens))


class Indexer(nn.Module):
    """Chooses two keys for each query, as the indexer of DeepSeek V3.2."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores.topk(min(2, scores.shape[-1]), dim=-1).indices.int()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(8, 8)
        self.indexer = Indexer()

    def forward(self, input_ids: Tensor) -> Tensor:
        scores = self.norm(input_ids.float())
        scores.topk(1)  # of no module that returns integers
        self.indexer(scores[:, :1])  # all of them: no choice
        keys: Tensor = self.indexer(scores[:, :5])
        return keys


def test_choice_of_an_indexer_is_seen_and_replaced() -> None:
    watch, model = Watch(), Sparse()
    with ChoiceTracer(watch.choose).attached(model), torch.no_grad():
        expected = model(IDS)
        model(IDS)

    first, second = watch.seen
    assert (first.module, first.step, first.call, second.step) == ("indexer", 0, 0, 1)
    assert torch.equal(first.indices, expected)
    assert torch.equal(first.selections[0].scores, model.norm(IDS.float())[:, :5])

    other = Watch((torch.tensor([[4, 3]] * 3), torch.zeros(3, 2)))
    with ChoiceTracer(other.choose, frozenset({"indexer"})).attached(model), torch.no_grad():
        assert model(IDS).tolist() == [[4, 3]] * 3
    assert torch.equal(other.seen[0].indices, expected)


def is_watched(model: nn.Module) -> bool:
    return any(module._forward_pre_hooks for module in model.modules())


def test_watch_ends_after_the_first_call_of_a_model_without_experts() -> None:
    watch, dense = Watch(), nn.Sequential(nn.Linear(8, 8))

    with ChoiceTracer(watch.choose).attached(dense), torch.no_grad():
        assert is_watched(dense)
        dense(torch.ones(3, 8))
        assert not is_watched(dense)
        assert _len_torch_function_stack() == 0
    assert watch.seen == []


def test_watch_goes_on_while_a_model_holds_experts_that_were_not_called() -> None:
    watch, block = Watch(), LateBlock()

    with ChoiceTracer(watch.choose).attached(block), torch.no_grad():
        block(IDS)
        assert is_watched(block)
        block(IDS)

    (choice,) = watch.seen
    assert [item.count for item in choice.selections] == [1, 2]
    assert not is_watched(block)


def test_other_modules_have_no_choice() -> None:
    tokens, ids = torch.ones(3, 8), torch.ones(3, 2, dtype=torch.long)

    assert find_choice_arguments({"input_ids": ids, "attention_mask": ids}) is None
    assert find_choice_arguments({0: tokens, 1: ids}) is None
    assert find_choice_arguments({0: tokens, 1: ids, "w": torch.ones(3, 2)}) == (1, "w")
    assert find_choice_arguments({0: tokens, 1: ids > 0, "w": torch.ones(3, 2)}) is None
