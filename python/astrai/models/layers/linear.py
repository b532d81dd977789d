"""Linear layers over a weight that owns its storage format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F


class BoundLinear(Protocol):
    """A linear layer reduced to one call on the kernels; writes and returns `out`."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor: ...


class LinearWeight(nn.Module, ABC):
    """A matrix [out_features, in_features] in some storage format, and how to multiply by it.

    A quantised format is another subclass: the layers above only know this interface.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the matrix that is represented."""

    @abstractmethod
    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features] times the transpose: [..., out_features], differentiable in x."""

    @abstractmethod
    def bind(self, bias: torch.Tensor | None = None) -> BoundLinear:
        """The same product of x [T, in_features] on the compiled kernels, without gradients."""


class DenseWeight(LinearWeight):
    """A weight held as a plain float32, float16 or bfloat16 matrix."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(out_features, in_features))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.values, bias)

    def bind(self, bias: torch.Tensor | None = None) -> BoundLinear:
        from astrai.extension import ops

        kernel, values = ops.linear, self.values.detach()
        frozen_bias = None if bias is None else bias.detach()

        def run(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            kernel(x, values, frozen_bias, out=out)
            return out

        return run


class Linear(nn.Module):
    """y = x W^T + b. `weight` is a LinearWeight [out_features, in_features]; bias is optional."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: LinearWeight = DenseWeight(out_features, in_features)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.matmul(x, self.bias)

    def bind(self) -> BoundLinear:
        """The layer as one kernel call over the present weights."""
        return self.weight.bind(self.bias)
