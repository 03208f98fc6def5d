import torch
from torch import nn

from assay.models.loading.loaded_model import add_biases_last


def test_product_is_rounded_before_its_bias_is_added() -> None:
    linear = nn.Linear(2, 1).to(torch.bfloat16)
    linear.weight.data = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    linear.bias.data = torch.tensor([-1.0], dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    fused = linear(ones)

    add_biases_last(linear)

    assert fused.item() == 2.0**-9
    assert linear(ones).item() == 0.0


def test_layers_with_a_custom_forward_keep_it() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return 2 * super().forward(input)

    linear = Doubling(2, 1)
    x = torch.randn(3, 2)
    expected = linear(x)

    add_biases_last(linear)

    assert torch.equal(linear(x), expected)
