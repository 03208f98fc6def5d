"""A convolutional network with batch norm and dropout, and a training loop of its own."""

import os

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + nn.functional.relu(self.norm(self.conv(image)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.first, self.second = Block(8), Block(8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.second(self.first(self.stem(image))).mean(dim=(2, 3))
        scores: torch.Tensor = self.head(self.dropout(features))
        return scores


torch.manual_seed(0)
model = Classifier()
if os.environ.get("FAULT"):
    model.second.conv.register_forward_hook(lambda module, images, output: output * 1.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(3):
    images, labels = torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
model.eval()
with torch.no_grad():
    model(torch.randn(2, 1, 8, 8))
