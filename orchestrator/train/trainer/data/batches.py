"""Batches: any nesting of tensors, and the computation of their loss.

Two forms are supported. A pair (inputs, targets) needs a loss function: loss_fn(model(inputs), targets). A mapping is
passed to the model by name, and either the model returns its loss (as Hugging Face models do), or loss_fn(outputs,
batch) computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.train.errors import DataError, ModelOutputError

LossFunction = Callable[[Any, Any], Tensor]


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` with `function` applied to every tensor in it; other values stay."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, function) for key, value in batch.items()}
        return items if type(batch) is dict else _rebuilt(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def _rebuilt(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(like)(items)  # type: ignore[call-arg]  # a list's or tuple's own type
    except TypeError:
        return items


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; from page-locked memory the copy overlaps with the GPU's work."""
    if device.type == "cpu":
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def first_tensor(batch: Any) -> Tensor:
    """Return the tensor that gives a batch's size. Raises DataError when there is none with a first dimension."""
    found = _find(batch)
    if found is None:
        raise DataError(
            f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension: return tensors from the "
            "dataset, or numbers and arrays that torch's default collate turns into tensors"
        )
    return found


def _find(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.dim() else None
    values: Sequence[Any] = ()
    if isinstance(batch, list | tuple):
        values = batch
    elif isinstance(batch, Mapping):
        values = [batch["input_ids"]] if "input_ids" in batch else list(batch.values())
    for value in values:
        found = _find(value)
        if found is not None:
            return found
    return None


def count(batch: Any) -> tuple[int, int]:
    """Return the number of samples and tokens in `batch`.

    Tokens are those of the first tensor when it is a (samples, length) matrix of whole numbers, else none.
    """
    shape, dtype = (tensor := first_tensor(batch)).shape, tensor.dtype
    if len(shape) != 2 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return shape[0], 0
    return shape[0], shape[0] * shape[1]


def split(batch: Any, parts: int) -> list[Any]:
    """Split `batch` into `parts` smaller ones of equal size. Raises DataError when its size is not divisible."""
    samples, _ = count(batch)
    if samples % parts:
        raise DataError(f"a batch of {samples} samples cannot be split into {parts} equal parts")
    size = samples // parts

    def piece(start: int) -> Any:
        return map_tensors(
            batch,
            lambda tensor: tensor[start : start + size] if tensor.dim() and tensor.shape[0] == samples else tensor,
        )

    return [piece(start) for start in range(0, samples, size)]


def compute_loss(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> tuple[Tensor, Any]:
    """Return the loss of `batch` (a scalar tensor), and the model's outputs.

    Raises ModelOutputError or DataError with the expected form.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2 and loss_fn is not None:
        outputs = model(batch[0])
        loss: Any = loss_fn(outputs, batch[1])
    elif isinstance(batch, Mapping):
        outputs = model(**batch)
        loss = _own_loss(outputs) if loss_fn is None else loss_fn(outputs, batch)
    elif loss_fn is None:
        outputs = _call(model, batch)
        loss = _own_loss(outputs)
    else:
        raise DataError(
            f"a batch of type {type(batch).__name__} is neither (inputs, targets) nor a mapping: return one of them from "
            "the dataset, or pass no loss_fn and let the model return its loss"
        )
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss, outputs
    return _one_number(loss), outputs


def _call(model: nn.Module, batch: Any) -> Any:
    if not isinstance(batch, list | tuple):
        return model(batch)
    try:
        return model(*batch)
    except TypeError as error:
        raise ModelOutputError(
            f"without loss_fn the model takes the {len(batch)} parts of a batch and returns its loss, and this one did not "
            f"({error}): pass loss_fn to setup_training"
        ) from error


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise ModelOutputError(
            f"the loss is a {type(loss).__name__}, not a tensor: return a scalar tensor from loss_fn"
        )
    if loss.dim() == 1:  # one for each GPU of a DataParallel model that returns its loss
        return loss.mean()
    raise ModelOutputError(f"the loss has shape {tuple(loss.shape)}: reduce it to one number, with .mean()")


def targets_of(batch: Any) -> Any:
    """Return what a metric compares outputs with: the second of a pair, else the whole batch."""
    return batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else batch


def _own_loss(outputs: Any) -> Any:
    """Return the loss in a model's outputs."""
    if isinstance(outputs, Tensor):
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ModelOutputError(
            f"the model returned a {type(outputs).__name__} without a loss: pass loss_fn to setup_training, or give the "
            "model its labels so that it computes one"
        )
    return loss
