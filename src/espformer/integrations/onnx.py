"""Export models with ``torch.export`` and ONNX, for any batch size and length.

A hardened model consists of sorts, gathers and matrix products, which ONNX supports. A soft model
is exported in its dense form, which works for every length but holds an N×N matrix per slice:
harden models before you ship them, or keep the sequences short.
"""

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espformer.integrations.inputs import Inputs, call_arguments
from espformer.nn import ESP
from espformer.ops.common.operators import tree_leaves
from espformer.ops.common.optional import how_to_install

__all__ = ["export_onnx", "export_program", "onnx_difference"]


def export_program(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    dynamic_batch: bool = True,
    dynamic_length: bool = True,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export a model with ``torch.export``, in evaluation mode.

    Args:
        model: any model; its ESP attention may be hard or soft.
        example_inputs: a tensor, a tuple of arguments, or a dictionary of keyword arguments. Batch
            size and length must be at least 2, because a size of 1 is treated as a constant.
        dynamic_batch: allow any batch size, the first dimension of every tensor.
        dynamic_length: allow any length, the second dimension of tensors with two or three
            dimensions: tokens, embeddings and masks. Images keep their size.
        dynamic_shapes: specifies dynamic sizes in the format of ``torch.export.export``, instead of
            the two options above.

    Returns:
        The program; ``program.module()`` can be called like the model.

    Example:
        >>> import espformer, torch
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = espformer.convert(model, espformer.nn.ESP(hard=True)).eval()
        >>> program = export_program(model, torch.randn(2, 10, 32))
        >>> x = torch.randn(3, 7, 32)  # another batch size and length
        >>> torch.allclose(program.module()(x), model(x), atol=1e-5)
        True
    """
    arguments, named = call_arguments("export_program", example_inputs)
    if dynamic_shapes is None:
        names = inspect.signature(model.forward).parameters
        inputs = dict(zip(names, arguments, strict=False)) | named
        dynamic_shapes = {
            name: _sizes(name, x, dynamic_batch, dynamic_length) for name, x in inputs.items()
        }
    with _for_export(model), torch.no_grad():
        return torch.export.export(
            model, arguments, named, dynamic_shapes=dynamic_shapes, strict=False
        )


def export_onnx(
    model: nn.Module,
    example_inputs: Inputs,
    path: str | Path,
    *,
    dynamic_batch: bool = True,
    dynamic_length: bool = True,
    dynamic_shapes: Any = None,
    tolerance: float | None = 1e-4,
) -> Path:
    """Write a model as an ONNX file, and check it against the model on the example.

    Args:
        model, example_inputs, dynamic_batch, dynamic_length, dynamic_shapes: as in
            :func:`export_program`.
        path: the file to write.
        tolerance: largest accepted difference between the outputs of the file and the model;
            checked if onnxruntime is installed. None skips the check.

    Returns:
        The path.

    Raises:
        ValueError: the outputs of the file differ from those of the model.

    Example:
        >>> import tempfile
        >>> import espformer, torch
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = espformer.convert(model, espformer.nn.ESP(hard=True)).eval()
        >>> x = torch.randn(3, 7, 32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = export_onnx(model, torch.randn(2, 10, 32), f"{folder}/model.onnx")
        ...     onnx_difference(model, x, path) < 1e-4
        True
    """
    program = export_program(
        model,
        example_inputs,
        dynamic_batch=dynamic_batch,
        dynamic_length=dynamic_length,
        dynamic_shapes=dynamic_shapes,
    )
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"export_onnx needs {how_to_install('onnxscript', 'onnx')}") from error
    path = Path(path)
    onnx_program = torch.onnx.export(
        program,
        output_names=_output_names(model, example_inputs),
        dynamo=True,
        verbose=False,
        custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
    )
    assert onnx_program is not None
    onnx_program.save(path)
    if tolerance is not None and importlib.util.find_spec("onnxruntime") is not None:
        difference = onnx_difference(model, example_inputs, path)
        if not difference <= tolerance:
            raise ValueError(
                f"export_onnx: an output of {path} is {difference:.2e} away from the model's on "
                f"the example, more than {tolerance:.0e}"
            )
    return path


def _output_names(model: nn.Module, example_inputs: Inputs) -> list[str]:
    """Names of the model's outputs: the keys of a dictionary, else ``output`` with a number."""
    arguments, named = call_arguments("export_onnx", example_inputs)
    if getattr(getattr(model, "config", None), "return_dict", None) is False:
        named = named | {"return_dict": True}  # a model of transformers that gives a tuple
    with _for_export(model), torch.no_grad():
        output = model(*arguments, **named)
    parts = dict(output) if hasattr(output, "items") else {"output": output}
    names: list[str] = []
    for key, value in parts.items():
        leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        names += [key] if len(leaves) == 1 else [f"{key}_{i}" for i in range(len(leaves))]
    return names


def _stable_sort(self: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    """A stable sort in ONNX's operators: where values are equal, TopK takes the lower index."""
    from onnxscript import opset18 as op

    size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


@contextlib.contextmanager
def _for_export(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode, and implementations whose graphs do not depend on the sizes."""
    training = {module: module.training for module in model.modules()}
    backends = {module: module.backend for module in model.modules() if isinstance(module, ESP)}
    try:
        model.eval()
        for mechanism in backends:
            # The linear-time soft sort cuts a sequence into chunks: a graph of it has one length.
            mechanism.backend = "linear" if mechanism.hard else "dense"
        yield
    finally:
        for mechanism, backend in backends.items():
            mechanism.backend = backend
        for module, mode in training.items():
            module.training = mode


def _sizes(name: str, x: Any, batch: bool, length: bool) -> dict[int, Any] | None:
    if not isinstance(x, Tensor):
        return None
    dynamic = [0] if batch and x.dim() else []
    dynamic += [1] if length and x.dim() in (2, 3) else []
    for dimension in dynamic:
        if x.shape[dimension] < 2:
            raise ValueError(
                f"export: {name} of shape {tuple(x.shape)} is too small an example: sizes that may "
                "vary must be at least 2 in it, since a size of 1 is taken for a constant"
            )
    return dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC)


def onnx_difference(model: nn.Module, inputs: Inputs, path: str | Path) -> float:
    """The largest difference between outputs of an ONNX file and of the model, on these inputs.

    The model is evaluated in the form that was exported. :func:`export_onnx` has an example.

    Args:
        model: the model that was exported.
        inputs: as the `example_inputs` of :func:`export_program`, of any batch size and length.
        path: the file.
    """
    import onnxruntime

    arguments, named = call_arguments("onnx_difference", inputs)
    with _for_export(model), torch.no_grad():
        expected = tree_leaves(model(*arguments, **named))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tensors = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor)]
    names = [x.name for x in session.get_inputs()]
    feeds = {name: x.cpu().numpy() for name, x in zip(names, tensors, strict=True)}
    found = session.run(None, feeds)
    wanted = [x.cpu() for x in expected if isinstance(x, Tensor)]
    return max(
        float((torch.from_numpy(a) - b).abs().max()) for a, b in zip(found, wanted, strict=True)
    )
