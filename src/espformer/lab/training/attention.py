"""Statistics of the attention of a model: sums, entropy, slices and their weights."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from espformer import esp_plan
from espformer.lab.training.learner import Learner
from espformer.nn import ESP

Call = tuple[str, ESP, tuple[Any, ...]]
"""Name of a mechanism, the mechanism, and the queries, keys and masks that it was called with."""


def attention_statistics(matrices: list[Tensor]) -> dict[str, float]:
    """Say how far attention matrices are from doubly stochastic, and how spread out they are.

    Args:
        matrices: ``(batch, heads, N, M)`` each; empty rows and columns are padding. Matrices with
            negative entries (differential attention) are no distributions and are left out.

    Returns:
        ``row_error`` and ``column_error``, the mean distance of the sums from one and from N/M, and
        ``entropy``, the mean over rows divided by that of the uniform row: 1 is uniform, 0 a
        permutation. Empty if nothing can be said.

    Example:
        >>> attention_statistics([torch.eye(4).expand(1, 1, 4, 4)])
        {'row_error': 0.0, 'column_error': 0.0, 'entropy': 0.0}
    """
    row_errors, column_errors, entropies = [], [], []
    for matrix in matrices:
        matrix = matrix.detach().float()
        if bool((matrix < -1e-6).any()):
            continue
        rows = matrix.ne(0).any(-1)
        columns = matrix.ne(0).any(-2)
        ratio = rows.sum(-1, keepdim=True) / columns.sum(-1, keepdim=True).clamp(min=1)
        row_errors.append((matrix.sum(-1) - 1).abs()[rows])
        column_errors.append((matrix.sum(-2) - ratio).abs()[columns])
        uniform = columns.sum(-1, keepdim=True).clamp(min=2).log()
        entropies.append((torch.special.entr(matrix.clamp(min=0)).sum(-1) / uniform)[rows])
    if not row_errors or not sum(part.numel() for part in row_errors):
        return {}
    parts = {"row_error": row_errors, "column_error": column_errors, "entropy": entropies}
    return {name: float(torch.cat(values).mean()) for name, values in parts.items()}


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Queries, keys and masks of every call of an ESP mechanism inside the block."""
    calls: list[Call] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, ESP):

            def record(
                mechanism: ESP, positional: tuple[Any, ...], named: dict[str, Any], name: str = name
            ) -> None:
                arguments = dict(zip(("query", "key", "value"), positional, strict=False)) | named
                masks = {key: arguments.get(key) for key in ("query_mask", "key_mask")}
                calls.append((name, mechanism, (arguments["query"], arguments["key"], masks)))

            hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def slice_weights(
    mechanism: ESP, query: Tensor, key: Tensor, masks: dict[str, Any], *, summed: bool = False
) -> Tensor:
    """σ = softmax(b - τ D) as the operator has it, ``(batch, heads, slices)``, slice by slice.

    D is the mean squared distance of queries and keys under the plan of one slice alone, as
    Algorithm 1 prints it, to half the power of `cost_exponent`; with `summed` it is the sum of the
    distances over the queries, neither squared nor divided by their number, which is how the
    formula is sometimes written in code.
    """
    settings = mechanism.arguments(query, training=False)
    slices = settings.pop("slices")
    tau, logits = settings.pop("inverse_temperature"), settings.pop("slice_logits")
    width = query.shape[-1]
    directions = torch.eye(width, device=query.device) if slices is None else slices
    scale = settings["scale"] or width**-0.5
    distance = torch.cdist(query.double() * scale, key.double() * scale)
    costs = []
    for index in range(directions.shape[-2]):
        one = directions[..., index : index + 1, :]
        plan = esp_plan(query, key, slices=one, inverse_temperature=0.0, **settings, **masks)
        if summed:
            costs.append((distance * plan).sum((-2, -1)))
            continue
        mean = (distance.square() * plan).sum((-2, -1)) / plan.sum((-2, -1)).clamp(min=1e-9)
        costs.append(mean.clamp(min=0) ** (settings["cost_exponent"] / 2))
    preferred = torch.stack(costs, -1).mul(-tau)
    return (preferred if logits is None else preferred + logits).softmax(-1)


@torch.no_grad()
def slice_statistics(calls: Sequence[Call]) -> dict[str, float]:
    """Say how much the slices of ESP mechanisms differ, and how far apart the sorted numbers are.

    Args:
        calls: of :func:`recorded_calls`.

    Returns:
        ``slice_weight``, the largest weight of a slice times their number, the mean over heads
        and layers: 1 where all weigh alike, L where one has all; ``slice_weight_summed``, what it
        would be with summed distances, see :func:`slice_weights`. ``spread``, the mean standard
        deviation of the numbers that are sorted, which an absolute temperature is to be compared
        with, and the mean ``sort_temperature``. Empty without an ESP mechanism.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)
    for _, mechanism, (query, key, masks) in calls:
        query, key = query.detach(), key.detach()
        for name, summed in (("slice_weight", False), ("slice_weight_summed", True)):
            weights = slice_weights(mechanism, query, key, masks, summed=summed)
            found[name].append((weights.amax(-1) * weights.shape[-1]).flatten())
        settings = mechanism.arguments(query, training=False)
        directions, scale = settings["slices"], settings["scale"] or query.shape[-1] ** -0.5
        for side, name in ((query, "query_mask"), (key, "key_mask")):
            points = side.double() * scale
            if directions is not None:
                points = points @ directions.double().mT
            found["spread"].append(_deviation(points, masks[name]).flatten())
        found["sort_temperature"].append(torch.as_tensor(settings["sort_temperature"]).flatten())
    return {name: float(torch.cat(parts).double().mean()) for name, parts in found.items()}


def _deviation(points: Tensor, mask: Tensor | None) -> Tensor:
    """Return the standard deviation over the tokens that take part, ``(batch, heads, slices)``."""
    if mask is None:
        return points.std(-2, correction=0)
    weight = mask.view(len(mask), 1, -1, 1).double()
    weight = weight / weight.sum(-2, keepdim=True).clamp(min=1)
    mean = (weight * points.nan_to_num()).sum(-2, keepdim=True)
    return (weight * (points - mean).nan_to_num().square()).sum(-2).sqrt()


class AttentionStatistics(Callback):
    """Logs how the attention is after epochs with a validation, on a few fixed examples of it.

    :func:`attention_statistics` each time, and after the last epoch :func:`slice_statistics` too.
    """

    examples = 4

    def __init__(self) -> None:
        self._batch: dict[str, Tensor] | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Learner)
        model: Any = pl_module.model
        loader: Any = trainer.val_dataloaders
        done, every = trainer.current_epoch + 1, trainer.check_val_every_n_epoch or 1
        last = done == trainer.max_epochs
        if (
            loader is None
            or not hasattr(model, "attention_matrices")
            or not (last or done % every == 0)
        ):
            return
        if self._batch is None:
            batch = next(iter(loader))
            few = {
                name: value[: self.examples]
                for name, value in batch.items()
                if name in ("inputs", "mask") and value is not None
            }
            self._batch = few if "inputs" in few else None
        if self._batch is None:
            return
        batch = {name: value.to(pl_module.device) for name, value in self._batch.items()}
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            inputs = pl_module.prepare(batch["inputs"], training=False)
            with recorded_calls(model) as calls:
                matrices = model.attention_matrices(inputs, batch.get("mask"))
            found = attention_statistics(matrices) | (slice_statistics(calls) if last else {})
        for name, value in found.items():
            pl_module.log(f"attention/{name}", value, rank_zero_only=True)
