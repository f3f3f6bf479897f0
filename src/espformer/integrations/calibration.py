"""Fit a converted model to the outputs of the original, on unlabelled inputs."""

import copy
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from espformer.integrations.candidates import MECHANISM, SCALE
from espformer.integrations.distillation import converted_modules, distil, output_error
from espformer.integrations.inputs import Inputs, call_arguments
from espformer.integrations.native import ORIGINAL
from espformer.integrations.slices import Call, fit_slices
from espformer.nn import ESP, Attention, Mechanism, Packed, Softmax
from espformer.ops.common.operators import without_autocast

__all__ = ["Calibration", "calibrate", "restore_weights"]

# Under this name a module keeps the weights that it had before it was calibrated.
_BEFORE = "_espformer_before_calibration"
_SAMPLED = 4096  # tokens that slices are chosen from

Progress = bool | Callable[[int, int, float], None]


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration; ``print`` shows it.

    Attributes:
        before: relative error of the converted model's output on the first batch: the squared error
            divided by the variance of the original's output.
        aligned: the same after the slices were chosen.
        after: the same after training; equal to `aligned` if training made it larger, since then
            the weights from before training are kept.
        losses: the loss of every step: the mean relative error over blocks and output.
        modules: names of the attention modules for which slices were chosen.
        seconds: duration of the calibration.
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
    r"""Fit a converted model to the outputs of the original, in place.

    It needs no labels, only a few hundred typical inputs. First, it chooses slices from the data:
    each ESP head gets the axes that contribute most to the scores of the original softmax attention
    (:mod:`espformer.integrations.slices`). ESP inside ``ClassToken`` or ``Differential`` keeps its
    axes. Then it trains weights, temperatures and slice weights by Adam, to reproduce the outputs
    of the original after every block and at the end (a loss, one number, is not taken for an
    output):

    .. math:: \frac1B \sum_{b=1}^{B} \Bigl( \sum_i \lVert h_{b,i} - h^*_{b,i} \rVert^2 \Bigr)
       \Big/ \Bigl( \sum_i \lVert h^*_{b,i} - \bar h^*_b \rVert^2 \Bigr),

    averaged with the same error of the sequence means; i runs over tokens that are not padding.
    Dropout is off, and only the order of the batches is random. A minute on a CPU brings the model
    part of the way; more steps, on a GPU, bring it further. A few steps can make the output worse:
    then the weights from before the training are kept, with a warning. Autocast is off, since
    slices are fitted in high precision.

    :func:`espformer.revert` restores the weights from before the calibration.

    Args:
        model: a model converted by :func:`espformer.convert` that has not been trained since. The
            original model is the teacher.
        batches: inputs of the model, each a tensor, a tuple of arguments or a dictionary of keyword
            arguments, on the model's device. They are cycled through.
        steps: number of training steps; 0 only chooses slices.
        learning_rate: peak learning rate of the weights; temperatures and slice weights get a
            higher one from :func:`espformer.nn.parameter_groups`. It warms up during a tenth of the
            steps, at least five, and decays to zero.
        train: "blocks" trains all weights of the blocks (layers) that contain a converted module,
            "attention" only those of the attention, "mechanism" only the mechanisms' parameters.
        choose_slices: False keeps the axes of the heads.
        progress: whether to report progress, or a function of (step, steps, loss).
        seed: determines the order of the batches.

    Returns:
        The errors before and after, and the loss of every step.

    Raises:
        ValueError: nothing in this model was converted, its mechanisms are hard, there is nothing
            to train, or there are no batches.
        RuntimeError: ``torch.inference_mode`` is on.

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
    held = converted_modules(model)
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
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "calibrate: torch.inference_mode is on, in which nothing can be trained; make the "
            "batches and call calibrate outside of it"
        )
    hard = [
        name
        for name, module in held.items()
        if any(getattr(part, "hard", False) for part in _mechanism(module).modules())
    ]
    if hard:
        raise ValueError(
            f"calibrate: {hard[0]} sorts exactly (hard=True), so its queries and keys get no "
            "gradient; call espformer.nn.soften(model) before, and espformer.harden(model) after"
        )
    data = _batches(batches)
    if not data:
        raise ValueError("calibrate: there are no batches; give some hundred inputs, in batches")
    teacher = _teacher(model)
    blocks = sorted({_block(name) for name in held} | {""})
    trained = _trained(model, held, blocks, train)
    if steps and not trained:
        raise ValueError(
            f"calibrate: there is nothing to train: with train={train!r} only parameters of the "
            "mechanisms are trained, and these have none (convert with ESP(learn_temperature=True) "
            'or ESP(learn_slice_weights=True), or pass train="blocks", or steps=0)'
        )
    _keep_weights(model, trained)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with without_autocast(device), _in_eval(model):
        losses: list[float] = []
        aligned: tuple[str, ...] = ()
        before = output_error(model, teacher, data[0])
        if choose_slices:
            aligned = tuple(_choose_slices(model, held, converted_modules(teacher), teacher, data))
        chosen = output_error(model, teacher, data[0])
        untrained = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if name in trained
        }
        for step, loss in enumerate(
            distil(model, teacher, data, blocks, trained, steps, learning_rate, seed), 1
        ):
            losses.append(loss)
            _tell(progress, step, steps, loss)
        after = output_error(model, teacher, data[0])
        if after > chosen:
            warnings.warn(
                f"calibrate: {steps} steps at learning_rate={learning_rate:g} made the output "
                f"worse (its error rose from {chosen:.3g} to {after:.3g}), so the weights from "
                "before them are kept; take more steps (hundreds), or a lower learning_rate",
                stacklevel=2,
            )
            after = chosen
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in untrained:
                        parameter.copy_(untrained[name])
    seconds = time.perf_counter() - began
    return Calibration(before, chosen, after, tuple(losses), aligned, seconds)


def _batches(batches: Iterable[Inputs]) -> list[Any]:
    if isinstance(batches, Mapping | Tensor):
        raise TypeError(
            f"calibrate: batches must be a list of batches, got one {type(batches).__name__} (for "
            "a single batch pass [batch])"
        )
    return [call_arguments("calibrate", inputs) for inputs in batches]


def _mechanism(module: nn.Module) -> Mechanism:
    return cast(Mechanism, getattr(module, MECHANISM))


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def restore_weights(model: nn.Module) -> None:
    """Restore the weights of calibrated modules from before the calibration."""
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.__dict__.pop(_BEFORE, {}).items():
                getattr(module, name).copy_(weight)


def _teacher(model: nn.Module) -> nn.Module:
    """A copy of the model as it was before the conversion, with mechanisms for softmax too."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    restore_weights(teacher)
    for module in converted_modules(teacher).values():
        if isinstance(module, Attention):
            mechanism = cast(Mechanism, module.__dict__[ORIGINAL])
        else:
            mechanism = Softmax(scale=module.__dict__.get(SCALE))
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
        for name, module in converted_modules(model).items()
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
    """Fit every converted module with ESP to the softmax attention it replaced; returns the names
    of the fitted modules.

    Modules are fitted in the order of their calls. Each gets its inputs from the modules before it,
    which are fitted already, and is fitted to the output of softmax in the original model.
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
        mechanism = _mechanism(held[name])
        while isinstance(mechanism, Packed):  # which computes the same
            mechanism = mechanism.base
        if not isinstance(mechanism, ESP):
            continue
        calls: list[Call] = []
        wanted = iter(outputs[name])

        def call(_: str, args: Any, masks: Any, __: Any) -> None:
            query, key, value = args
            output = next(wanted)  # noqa: B023, called before the next module
            if query.shape[2] == key.shape[2] and masks.get("query_mask") is masks.get("key_mask"):
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
    """Record (name, arguments, options, output) of every call of the modules' mechanisms."""
    handles = []
    for name, module in modules.items():

        def record(_module: Any, args: Any, options: Any, output: Any, name: str = name) -> None:
            hear(name, args, options, output)

        mechanism = _mechanism(module)
        handles.append(mechanism.register_forward_hook(record, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tell(progress: Progress, step: int, steps: int, loss: float) -> None:
    if callable(progress):
        progress(step, steps, loss)
    elif progress and (step == steps or step % max(1, steps // 10) == 0):
        print(f"calibrate: step {step} of {steps}, loss {loss:.4f}", file=sys.stderr, flush=True)
