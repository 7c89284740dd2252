"""The models that are measured, with synthetic data for each: the same numbers for the same seed on every machine.

A user's factory returns a module for the standard data (50 features, 3 targets, mean squared error), or a tuple of the module,
a function ``(samples, generator) -> (inputs, targets)`` and a loss ``(outputs, targets) -> scalar``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Generator, Tensor, nn

if TYPE_CHECKING:
    from types import ModuleType

FEATURES: Final = 50
TARGETS: Final = 3
_TOKENS: Final = 256
_LENGTH: Final = 32
_WIDTH: Final = 128
_CLASSES: Final = 10

MakeBatch = Callable[[int, Generator], tuple[Tensor, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]


class ModelError(Exception):
    """A model cannot be made: a file, a factory or what it returns is not as documented. The message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with its training data and loss."""

    model: nn.Module
    batch: MakeBatch
    loss: Loss

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def make_workload(name: str, seed: int) -> Workload:
    """Create the model of this name, or of ``FILE.py:factory``, initialised from the seed. Raises ModelError."""
    torch.manual_seed(seed)
    made = _BUILT_IN[name]() if name in _BUILT_IN else _from_file(name)
    if not made.parameters:
        raise ModelError(f"{name} has no trainable parameters: there is nothing to measure")
    return made


def table_batch(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return a batch of 50 features, two of them correlated with the first as market indicators are, and 3 targets."""
    features = torch.randn(samples, FEATURES, generator=generator)
    noise = torch.randn(samples, 2, generator=generator)
    features[:, 1] = 0.7 * features[:, 0] + 0.3 * noise[:, 0]
    features[:, 2] = 0.5 * features[:, 0] - 0.3 * features[:, 1] + 0.4 * noise[:, 1]
    return features, torch.randn(samples, TARGETS, generator=generator)


def _mlp(widths: tuple[int, ...], dropout: float) -> Workload:
    layers: list[nn.Module] = []
    last = FEATURES
    for width in widths:
        layers += [nn.Linear(last, width), nn.ReLU(), nn.Dropout(dropout)]
        last = width
    layers.append(nn.Linear(last, TARGETS))
    return Workload(model=nn.Sequential(*layers), batch=table_batch, loss=nn.functional.mse_loss)


def _medium() -> Workload:
    return _mlp((256, 128, 64), 0.2)


def _large() -> Workload:
    return _mlp((1024, 1024, 512, 512, 256), 0.3)


def _conv() -> Workload:
    layers: list[nn.Module] = []
    last = 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(last, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        last = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, _CLASSES)]

    def images(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        pixels = torch.randn(samples, 3, 32, 32, generator=generator)
        return pixels, torch.randint(_CLASSES, (samples,), generator=generator)

    return Workload(model=nn.Sequential(*layers), batch=images, loss=nn.functional.cross_entropy)


class _Transformer(nn.Module):
    """Two encoder layers with a causal mask over 32 tokens; predicts the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_TOKENS, _WIDTH)
        self.places = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(tokens) + self.places, mask=self.mask, is_causal=True)
        out: Tensor = self.head(hidden)
        return out.flatten(0, 1)


def _transformer() -> Workload:
    def text(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(_TOKENS, (samples, _LENGTH + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten().contiguous()

    return Workload(model=_Transformer(), batch=text, loss=nn.functional.cross_entropy)


_BUILT_IN: Final = {"medium": _medium, "large": _large, "conv": _conv, "transformer": _transformer}


def _from_file(name: str) -> Workload:
    path, _, factory = name.rpartition(":")
    make = getattr(_module(Path(path)), factory, None)
    if not callable(make):
        raise ModelError(f"{path} has no function {factory}: write --model {path}:NAME with one that it has")
    try:
        made = make()
    except Exception as error:
        raise ModelError(f"{name} failed: {type(error).__name__}: {error}") from error
    if isinstance(made, nn.Module):
        return Workload(model=made, batch=table_batch, loss=nn.functional.mse_loss)
    if (
        not isinstance(made, tuple)
        or len(made) != 3
        or not isinstance(made[0], nn.Module)
        or not all(map(callable, made))
    ):
        raise ModelError(f"{name} returned {type(made).__name__}: return a module, or (module, batch, loss)")
    return Workload(model=made[0], batch=made[1], loss=made[2])


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"{path} not found: give the path of a Python file")
    spec = importlib.util.spec_from_file_location(f"orch_bench_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module
