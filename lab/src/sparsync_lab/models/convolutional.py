"""ResNet-20, ResNet-18 and VGG-16 for images of 32 x 32 in three colours."""

from __future__ import annotations

from torch import Tensor, nn

from sparsync_lab.models.fnn_lenet import kaiming, xavier

VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, and how many convolutions have them


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a shortcut round them.

    Args:
        inputs, outputs: channels.
        stride: of the first convolution.
        projection: a shortcut of another shape is a 1 x 1 convolution; without, it has no parameters: every
            ``stride``-th pixel, and channels of zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.stride, self.new_channels = stride, outputs - inputs
        self.shortcut: nn.Module | None = None
        if projection and (stride > 1 or inputs != outputs):
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.shortcut(x) if self.shortcut is not None else self._subsampled(x)
        x = self.first_norm(self.first(x)).relu()
        x = self.second_norm(self.second(x)) + kept
        return x.relu()

    def _subsampled(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        return nn.functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before)) if self.new_channels else x


def resnet20(classes: int = 10) -> nn.Sequential:
    """Build ResNet-20 for CIFAR-10 with shortcuts that have no parameters, 269,722 parameters; ReLU.

    The paper names Xavier and Kaiming and not which is where: here convolutions are Kaiming, the classifier Xavier.
    """
    return _resnet((16, 32, 64), blocks=3, projection=False, classes=classes)


def resnet18(classes: int = 10) -> nn.Sequential:
    """Build ResNet-18 for CIFAR-10 with a 3 x 3 convolution first, 11,173,962 parameters; drawn as ``resnet20``."""
    return _resnet((64, 128, 256, 512), blocks=2, projection=True, classes=classes)


def _resnet(widths: tuple[int, ...], blocks: int, projection: bool, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for width in widths:
        for block in range(blocks):
            stride = 2 if block == 0 and width != widths[0] else 1
            layers.append(ResidualBlock(inputs, width, stride, projection))
            inputs = width
    classifier = nn.Linear(inputs, classes)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier).apply(kaiming)
    xavier(classifier)
    return model


def vgg16(classes: int = 10) -> nn.Sequential:
    """Build VGG-16 for CIFAR-10 with batch norm and one linear layer, 14,728,266 parameters; Kaiming, ReLU."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, convolutions in VGG16:
        for _ in range(convolutions):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes)).apply(kaiming)
