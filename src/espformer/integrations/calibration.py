"""Fit a converted model to what the original computed, on inputs without labels."""

import copy
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from espformer.integrations.candidates import MECHANISM, Converted
from espformer.integrations.inputs import Inputs, call_arguments
from espformer.integrations.native import ORIGINAL
from espformer.integrations.slices import Call, fit_slices
from espformer.nn import ESP, Attention, Differential, Mechanism, Softmax, parameter_groups

__all__ = ["Calibration", "calibrate", "restore_weights"]

# Under this name a module keeps the weights that it had before it was calibrated.
_BEFORE = "_espformer_before_calibration"
_SAMPLED = 4096  # tokens that slices are chosen from
_WARM_UP = 0.1  # share of the steps in which the learning rate rises

Progress = bool | Callable[[int, int, float], None]


@dataclass(frozen=True)
class Calibration:
    """What a calibration did; ``print`` shows it.

    Attributes:
        before: error of the model's output on the first batch, as a share of the variance of the
            original's output, after the conversion.
        aligned: the same after slices were chosen.
        after: the same in the end.
        losses: the loss of every step: the mean of such shares, over blocks and output.
        modules: names of the attention modules whose slices were chosen.
        seconds: how long it took.
    """

    before: float
    aligned: float
    after: float
    losses: tuple[float, ...]
    modules: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return (
            f"error of the output, as a share of its variance: {self.before:.3f} converted, "
            f"{self.aligned:.3f} with slices chosen in {len(self.modules)} modules, "
            f"{self.after:.3f} after {len(self.losses)} steps ({self.seconds:.0f} s)"
        )


def calibrate(
    model: nn.Module,
    batches: Iterable[Inputs],
    *,
    steps: int = 60,
    learning_rate: float = 5e-4,
    train: str = "blocks",
    choose_slices: bool = True,
    progress: Progress = True,
    seed: int = 0,
) -> Calibration:
    r"""Fit a converted model to the outputs that it had with its own attention, in place.

    No labels are needed: some hundred inputs of the kind that the model is for. First, slices are
    chosen from the data: each head of ESP gets the axes along which its queries and keys carry most
    of the scores that softmax saw (:mod:`espformer.integrations.slices`). Then weights,
    temperatures and slice weights are trained for some steps, by Adam, to give the outputs of the
    original after every block and in the end:

    .. math:: \frac1B \sum_{b=1}^{B} \Bigl( \sum_i \lVert h_{b,i} - h^*_{b,i} \rVert^2 \Bigr)
       \Big/ \Bigl( \sum_i \lVert h^*_{b,i} - \bar h^*_b \rVert^2 \Bigr),

    the mean of two such shares: over tokens i that are no padding, and over the means of sequences.
    Dropout is off, and nothing is random but the order of the
    batches. A minute on a CPU goes a part of the way; more steps, on a GPU, go further.

    :func:`espformer.revert` gives the weights of before the calibration back.

    Args:
        model: a model that :func:`espformer.convert` converted and whose weights were not trained
            since; what it computed before is its teacher.
        batches: inputs of the model, each a tensor, a tuple of arguments or a dictionary of named
            ones, on the model's device; gone through again and again.
        steps: number of steps; 0 chooses slices only.
        learning_rate: of the weights; :func:`espformer.nn.parameter_groups` gives temperatures and
            slice weights a higher one. It rises for a tenth of the steps and falls to zero.
        train: "blocks" trains all weights of the blocks (layers) that hold a converted module,
            "attention" those of the attention alone, "mechanism" only what the mechanisms learn.
        choose_slices: False leaves the axes of the heads as they are.
        progress: whether to tell how it goes, or a function of (step, steps, loss).
        seed: decides the order of the batches.

    Raises:
        ValueError: nothing in this model was converted, or there are no batches.

    Example:
        >>> import espformer, torch
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> model = espformer.convert(model, espformer.nn.ESP(learn_temperature=True))
        >>> batches = [torch.randn(4, 10, 32) for _ in range(3)]
        >>> result = espformer.calibrate(model, batches, steps=10, progress=False)
        >>> result.after < result.before
        True
    """
    began = time.perf_counter()
    held = _converted(model)
    if not held:
        raise ValueError(
            f"calibrate: no module of this {type(model).__name__} was converted; call "
            "espformer.convert(model, mechanism) first"
        )
    if train not in ("blocks", "attention", "mechanism"):
        raise ValueError(
            f'calibrate: train must be "blocks", "attention" or "mechanism", got {train!r}'
        )
    if steps < 0:
        raise ValueError(f"calibrate: steps must be at least 0, got {steps}")
    data = [call_arguments(inputs) for inputs in batches]
    if not data:
        raise ValueError("calibrate: there are no batches; give some hundred inputs, in batches")
    teacher = _teacher(model)
    modes = {module: module.training for module in model.modules()}
    blocks = sorted({_block(name) for name in held} | {""})
    trained = _trained(model, held, blocks, train)
    _keep_weights(model, trained)
    try:
        model.eval()
        losses: list[float] = []
        aligned: tuple[str, ...] = ()
        before = _output_error(model, teacher, data[0])
        if choose_slices:
            aligned = tuple(_choose_slices(model, held, _converted(teacher), teacher, data))
        chosen = _output_error(model, teacher, data[0])
        for step, loss in enumerate(
            _distil(model, teacher, data, blocks, trained, steps, learning_rate, seed), 1
        ):
            losses.append(loss)
            _tell(progress, step, steps, loss)
        after = _output_error(model, teacher, data[0])
    finally:
        for module, mode in modes.items():
            module.training = mode
    seconds = time.perf_counter() - began
    return Calibration(before, chosen, after, tuple(losses), aligned, seconds)


def restore_weights(model: nn.Module) -> None:
    """Give the modules that were calibrated the weights that they had before."""
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.__dict__.pop(_BEFORE, {}).items():
                getattr(module, name).copy_(weight)


def _converted(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Converted) or ORIGINAL in module.__dict__
    }


def _teacher(model: nn.Module) -> nn.Module:
    """A copy that computes what the model did before it was converted, in mechanisms too."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    restore_weights(teacher)
    for module in _converted(teacher).values():
        if isinstance(module, Attention):
            mechanism = cast(Mechanism, module.__dict__[ORIGINAL])
        else:
            own = cast(Mechanism, getattr(module, MECHANISM))
            while isinstance(own, Differential):
                own = own.base
            mechanism = Softmax(scale=cast(Any, getattr(own, "scale", None)))
        setattr(module, MECHANISM, mechanism.eval())
    return teacher


def _block(name: str) -> str:
    """The layer of a stack that holds a module: ``encoder.layer.0`` of ``encoder.layer.0.attn``."""
    found = re.match(r"(.*\.\d+|\d+)(\.|$)", name)
    return found[1] if found else ""


def _trained(
    model: nn.Module, held: dict[str, nn.Module], blocks: list[str], train: str
) -> set[str]:
    """Names of the parameters that are trained."""
    modules = dict(model.named_modules())
    within = set()
    for name in held:
        if train == "mechanism":
            within.add(f"{name}.{MECHANISM}")
            continue
        if train == "blocks" and _block(name):
            within.add(_block(name))
            continue
        # BERT's output projection is beside its attention, in a module around both.
        around = name.rpartition(".")[0]
        while around and "Attention" in type(modules[around]).__name__:
            name, around = around, around.rpartition(".")[0]
        within.add(name)
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and any(outer == "" or name.startswith(f"{outer}.") for outer in within)
    }


def _keep_weights(model: nn.Module, trained: set[str]) -> None:
    """Remember the weights that a calibration may change, those of the first one."""
    kept = trained | {
        f"{name}.{weight}"
        for name, module in _converted(model).items()
        for weight, _ in module.named_parameters()
    }
    for name, parameter in model.named_parameters():
        owner, _, weight = name.rpartition(".")
        module = model.get_submodule(owner)
        if name in kept and not isinstance(module, Mechanism):
            before = module.__dict__.setdefault(_BEFORE, {})
            before.setdefault(weight, parameter.detach().clone())


@torch.no_grad()
def _choose_slices(
    model: nn.Module,
    held: dict[str, nn.Module],
    teachers: dict[str, nn.Module],
    teacher: nn.Module,
    data: list[Any],
) -> Iterator[str]:
    """Fit every module whose ESP sorts along axes to softmax in its place; their names.

    One after the other, in the order in which they are called: each gets the tokens that those
    before it, which are fitted already, give it, and is fitted to what softmax gave in the
    original.
    """
    outputs: dict[str, list[Tensor]] = {}
    batches: list[Any] = []

    def keep(name: str, _args: Any, _options: Any, output: Any) -> None:
        outputs.setdefault(name, []).append(output)

    for args, options in data:
        with _listening(teachers, keep):
            teacher(*args, **options)
        batches.append((args, options))
        if sum(x.shape[0] * x.shape[2] for x in next(iter(outputs.values()), [])) >= _SAMPLED:
            break
    for name in outputs:
        mechanism = cast(Mechanism, getattr(held[name], MECHANISM))
        if not isinstance(mechanism, ESP) or mechanism.slicer_kind != "axis":
            continue
        calls: list[Call] = []

        def call(_: str, args: Any, masks: Any, __: Any, name: str = name) -> None:
            query, key, value = args
            if query.shape[2] == key.shape[2] and masks.get("query_mask") is None:
                output = outputs[name][len(calls)]  # noqa: B023, called before the next module
                calls.append(Call(query, key, value, output, masks.get("key_mask")))  # noqa: B023

        for args, options in batches:
            with _listening({name: held[name]}, call):
                model(*args, **options)
        if calls and fit_slices(held[name], mechanism, calls):
            yield name


@contextmanager
def _listening(
    modules: dict[str, nn.Module], hear: Callable[[str, Any, Any, Any], None]
) -> Iterator[None]:
    """Hear (name, arguments, options, output) of every call of the modules' mechanisms."""
    handles = []
    for name, module in modules.items():

        def record(_module: Any, args: Any, options: Any, output: Any, name: str = name) -> None:
            hear(name, args, options, output)

        mechanism = cast(Mechanism, getattr(module, MECHANISM))
        handles.append(mechanism.register_forward_hook(record, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _distil(
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
            rate = min((step + 1) / max(1, round(_WARM_UP * steps)), 1 - step / steps)
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
def _output_error(model: nn.Module, teacher: nn.Module, batch: Any) -> float:
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
        raise ValueError("calibrate: the model gives no tensor of floating-point numbers")
    return torch.stack(errors)


def _error(found: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """Error as a share of the variance: of tokens, and of the means of sequences, half each.

    What all tokens of a sequence share is a small part of their variance, and all that a mean over
    them, or a classifier on it, is made of.
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
            leaves = torch.utils._pytree.tree_leaves(
                dict(output) if hasattr(output, "items") else output
            )
            tensors = (x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
            first = next(tensors, None)
            if first is not None:
                record.outputs[name] = first

        handles.append(model.get_submodule(name).register_forward_hook(keep))

    def look(_module: Any, _args: Any, options: Any) -> None:
        given = options.get("query_mask")
        given = options.get("key_mask") if given is None else given
        if given is not None and given.dim() == 2:
            record.mask = given

    for module in _converted(model).values():
        mechanism = cast(Mechanism, getattr(module, MECHANISM))
        handles.append(mechanism.register_forward_pre_hook(look, with_kwargs=True))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _tell(progress: Progress, step: int, steps: int, loss: float) -> None:
    if callable(progress):
        progress(step, steps, loss)
    elif progress and (step == steps or step % max(1, steps // 10) == 0):
        print(f"calibrate: step {step} of {steps}, loss {loss:.4f}", file=sys.stderr, flush=True)
