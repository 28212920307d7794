"""A network of another library as a module of ours: the same weights under the same names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from torch import nn

from aniso.json_value import JsonObject
from aniso.vectors import BlockSource, Layout
from aniso.weights import TensorMap
from aniso.weights.source import ModelConfig

_SHARED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Wrapped(nn.Module, ABC):
    """A module with the children of a library's network, so that its state dict is an ordinary checkpoint.

    All its parameters are frozen.
    """

    home: Path | None = None
    """The directory it was loaded from, with its configuration and tokenizer; None for a name."""

    known_fingerprint: str | None = None
    """Given where the weights are shared out among several processes, so that none could compute it."""

    def __init__(self, name: str, network: nn.Module, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.name = name
        self.model_config = config or ModelConfig()
        # the same dictionaries, not copies: what is moved or composed here is moved and composed there
        self.__dict__.update({part: network.__dict__[part] for part in _SHARED})
        self.__dict__["_network"] = network
        self.__dict__["same_as"] = (network,)  # composed weights are installed there, too
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.eval()

    _network: nn.Module

    def train(self, mode: bool = True) -> Self:
        """Do nothing for batch norms, which stay in evaluation mode: their statistics belong to the base."""
        super().train(mode)
        self._network.training = mode
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        return self

    @abstractmethod
    def identity(self) -> JsonObject:
        """Return everything the model's outputs depend on, as JSON-serialisable data."""

    def weight_source(self) -> TensorMap:
        """Return the model's weights as a weight source."""
        return TensorMap(self.state_dict(), self.name, config=self.model_config, home=self.home)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.weight_source())

    @property
    def fingerprint(self) -> str:
        """A hash of the blocks of task vectors; it does not depend on the library's names."""
        return self.known_fingerprint or BlockSource(self.weight_source()).identity().content

    def __repr__(self) -> str:
        size = sum(block.numel for block in self.layout.blocks)
        return f"{type(self).__name__}({self.name}: {len(self.layout.blocks)} blocks, {size:,} parameters)"
