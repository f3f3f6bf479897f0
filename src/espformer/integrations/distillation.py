"""Training of a converted model towards the blocks of the original."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from espformer.integrations.candidates import MECHANISM, Converted
from espformer.integrations.native import ORIGINAL
from espformer.nn import Mechanism, parameter_groups
from espformer.ops.common.operators import tree_leaves

__all__ = ["converted_modules", "distil", "output_error"]

# The learning rate rises during this share of the steps, and at least so many.
_WARM_UP, _LEAST_WARM_UP = 0.1, 5


def converted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of a model that were converted, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Converted) or ORIGINAL in module.__dict__
    }


def distil(
    model: nn.Module,
    teacher: nn.Module,
    data: list[Any],
    blocks: list[str],
    trained: set[str],
    steps: int,
    learning_rate: float,
    seed: int,
) -> Iterator[float]:
    """Train towards the teacher's blocks; the loss of each step."""
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    groups = parameter_groups(model, lr=learning_rate)
    for group in groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
        group["peak"] = group["lr"]
    optimiser = torch.optim.Adam([group for group in groups if group["params"]])
    weights = [p for group in optimiser.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(seed)
    order = itertools.chain.from_iterable(
        torch.randperm(len(data), generator=generator).tolist() for _ in itertools.count()
    )
    try:
        for step, index in zip(range(steps), order, strict=False):
            rate = min((step + 1) / max(_LEAST_WARM_UP, round(_WARM_UP * steps)), 1 - step / steps)
            for group in optimiser.param_groups:
                group["lr"] = rate * group["peak"]
            with torch.enable_grad():
                loss = _errors(model, teacher, data[index], blocks).mean()
                loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimiser.step()
            optimiser.zero_grad()
            if not bool(loss.isfinite()):
                raise ValueError(
                    f"calibrate: the loss is {float(loss.detach())} in step {step + 1}; a lower "
                    f"learning_rate than {learning_rate:g} may help"
                )
            yield float(loss.detach())
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted[name])
            parameter.grad = None


@torch.no_grad()
def output_error(model: nn.Module, teacher: nn.Module, batch: Any) -> float:
    return float(_errors(model, teacher, batch, [""])[0])


def _errors(model: nn.Module, teacher: nn.Module, batch: Any, blocks: list[str]) -> Tensor:
    """The error of each block's output, as a share of the variance of the teacher's."""
    args, options = batch
    with torch.no_grad(), _recording(teacher, blocks) as wanted:
        teacher(*args, **options)
    with _recording(model, blocks) as found:
        model(*args, **options)
    errors = []
    for name in blocks:
        if name in found.outputs and name in wanted.outputs:
            errors.append(_error(found.outputs[name], wanted.outputs[name], found.mask))
    if not errors:
        raise ValueError(
            "calibrate: the model gives no tensor of floating-point numbers, or a loss alone"
        )
    return torch.stack(errors)


def _error(found: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """Error as a share of the variance: of tokens, and of the means of sequences, half each.

    The sequence mean is a small part of the variance of tokens, but it is all that mean pooling, or
    a classifier on it, uses.
    """
    found, wanted = found.float(), wanted.float()
    if wanted.dim() != 3:
        return _share(found, wanted)
    if mask is not None and mask.shape == wanted.shape[1::-1] != wanted.shape[:2]:
        found, wanted = found.transpose(0, 1), wanted.transpose(0, 1)
    if mask is None or mask.shape != wanted.shape[:2]:
        mask = torch.ones(wanted.shape[:2], dtype=torch.bool, device=wanted.device)
    tokens = _share(found[mask], wanted[mask])
    weight = mask.unsqueeze(-1) / mask.sum(1).clamp_min(1)[:, None, None]
    means = [(x.masked_fill(~mask.unsqueeze(-1), 0) * weight).sum(1) for x in (found, wanted)]
    return tokens if len(wanted) < 2 else (tokens + _share(*means)) / 2


def _share(found: Tensor, wanted: Tensor) -> Tensor:
    centre = wanted.mean(tuple(range(wanted.dim() - 1)), keepdim=True)
    spread = (wanted - centre).square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    return (found - wanted).square().sum() / spread


class _Record:
    """First tensors that blocks returned in a forward, and which tokens were no padding."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.mask: Tensor | None = None


@contextmanager
def _recording(model: nn.Module, blocks: list[str]) -> Iterator[_Record]:
    record = _Record()
    handles = []
    for name in blocks:

        def keep(_module: Any, _args: Any, output: Any, name: str = name) -> None:
            leaves = tree_leaves(dict(output) if hasattr(output, "items") else output)
            tensors = (x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
            # A single number is a loss: models that are given labels return it first.
            first = next((x for x in tensors if x.dim() > 0), None)
            if first is not None:
                record.outputs[name] = first

        handles.append(model.get_submodule(name).register_forward_hook(keep))

    def look(_module: Any, _args: Any, options: Any) -> None:
        given = options.get("query_mask")
        given = options.get("key_mask") if given is None else given
        if given is not None and given.dim() == 2:
            record.mask = given

    for module in converted_modules(model).values():
        mechanism = cast(Mechanism, getattr(module, MECHANISM))
        handles.append(mechanism.register_forward_pre_hook(look, with_kwargs=True))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
