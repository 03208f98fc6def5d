"""The matrix products of a model: what a token is multiplied by."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Product:
    """A product of tokens, (T, K), with weights of one shape, (K, N)."""

    shape: tuple[int, int]
    is_transposed: bool
    """True if the weight is stored as (N, K), as in `nn.Linear`."""
    is_chosen: bool = False
    """True for weights of experts, which are chosen for each token."""
    count: int = 1
    """Such products of a token in one call."""

    @property
    def num_weights(self) -> int:
        """Number of weights of one product."""
        return self.shape[0] * self.shape[1]

    @property
    def backward(self) -> "Product":
        """The product that gives the gradient of the tokens: by the same weight, transposed."""
        return replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed)


# Stands in for the products of a call that multiplies no weight.
_ANY_PRODUCT = Product((1024, 1024), is_transposed=True)

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

# Dimensions of a batch of matrices.
_BATCHED = 3


class ProductCounter(TorchDispatchMode):
    """Counts the products of tokens with weights in one call of a model.

    num_tokens: given in the call.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self._counts: Counter[Product] = Counter()

    @property
    def found(self) -> list[Product]:
        """The products of each token; at least one."""
        counts = self._counts.items()
        return [replace(one, count=count) for one, count in counts] or [_ANY_PRODUCT]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - any operator
        """Count the product of an operator, and call it."""
        del types
        if func in _PRODUCTS:
            tokens, weight = args[-2:]
            num_products, is_chosen = 1, weight.dim() == _BATCHED
            if is_chosen:
                if weight.shape[-1] == 1:
                    tokens, weight = weight.mT, tokens.mT
                # Experts are batched by token. Attention has several rows in each product.
                num_products = weight.shape[0] // self._num_tokens if tokens.shape[1] == 1 else 0
            shape, is_transposed = tuple(weight.shape[-2:]), weight.stride(-2) == 1
            if num_products:
                self._counts[Product(shape, is_transposed, is_chosen)] += num_products
        return func(*args, **(kwargs or {}))
