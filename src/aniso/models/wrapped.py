"""A network of some library under a face of ours: the same weights under the same names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from torch import nn

from aniso.json_value import JsonObject
from aniso.vectors import BlockSource, Layout
from aniso.weights import TensorMap
from aniso.weights.source import ModelConfig

_SHARED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Wrapped(nn.Module, ABC):
    """It has the library's own children under the library's own names, so that its state dict is an ordinary
    checkpoint. Nothing in it asks for gradients."""

    def __init__(self, name: str, network: nn.Module, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.name = name
        self.model_config = config or ModelConfig()
        # the very dictionaries, not copies: what is moved or composed here is moved and composed there
        self.__dict__.update({part: network.__dict__[part] for part in _SHARED})
        self.__dict__["_network"] = network
        self.__dict__["same_as"] = (network,)  # where composed weights have to be put, too
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.eval()

    _network: nn.Module

    def train(self, mode: bool = True) -> Self:
        """Batch norms stay in evaluation mode: the base's statistics are part of the base."""
        super().train(mode)
        self._network.training = mode
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        return self

    @abstractmethod
    def identity(self) -> JsonObject:
        """All that what it says depends on, as plain data."""

    def weight_source(self) -> TensorMap:
        """Its weights, as anything that reads weights takes them."""
        return TensorMap(self.state_dict(), self.name, config=self.model_config)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.weight_source())

    @property
    def fingerprint(self) -> str:
        """Of the blocks that vectors are about: equal for the same model under another library's names."""
        return BlockSource(self.weight_source()).identity().content

    def __repr__(self) -> str:
        size = sum(block.numel for block in self.layout.blocks)
        return f"{type(self).__name__}({self.name}: {len(self.layout.blocks)} blocks, {size:,} parameters)"
