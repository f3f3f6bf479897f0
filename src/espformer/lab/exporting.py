"""Export of a trained run, a fine-tuned run or a transformers directory to a graph."""

import contextlib
import importlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espformer.integrations.onnx import export_onnx, export_program, onnx_difference
from espformer.lab.data import Task
from espformer.lab.errors import RunError, first_line, in_one_line
from espformer.lab.training.checkpoints import checkpoint_file, read_checkpoint
from espformer.lab.training.learner import MARK
from espformer.nn import ESP, harden, soften
from espformer.ops.common.operators import tree_leaves

TOLERANCE = 1e-4
# A hard sort is discontinuous where two tokens are nearly tied, so a correct graph may differ on
# one input. Several inputs are tried: a wrong graph differs on all of them.
ATTEMPTS = 3
# (batch, length): the sizes that a graph is made with, and others that it must serve.
EXAMPLE, OTHERS = (2, 12), ((1, 7), (3, 33))


@dataclass(frozen=True)
class Exportable:
    """A model, and the names, kinds and sizes of its inputs.

    Attributes:
        model: the model, in evaluation mode.
        inputs: name of each input and its kind: "ids", "mask", "images" or "points".
        vocabulary: number of token ids.
        image: (channels, height, width).
        longest: most tokens that the model takes.
    """

    model: nn.Module
    inputs: dict[str, str]
    vocabulary: int = 0
    image: tuple[int, int, int] = (0, 0, 0)
    longest: int | None = None

    @property
    def has_length(self) -> bool:
        """Whether the number of tokens can vary."""
        return "images" not in self.inputs.values()

    def example(self, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs; sequences of a batch differ in length, the first is the longest."""
        generator = torch.Generator().manual_seed(seed)
        length = length if self.longest is None else min(length, self.longest)
        lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
        lengths[0] = length
        mask = torch.arange(length) < lengths
        makers = {
            "ids": lambda: torch.randint(self.vocabulary, (batch, length), generator=generator),
            "mask": lambda: mask,
            "integer_mask": mask.long,
            "images": lambda: torch.randn(batch, *self.image, generator=generator),
            "points": lambda: torch.randn(batch, length, 3, generator=generator),
        }
        return {name: makers[kind]() for name, kind in self.inputs.items()}


def open_model(path: Path, which: str = "last") -> Exportable:
    """Return the model of a run's directory or checkpoint, or of a directory of transformers."""
    if (path / "config.json").is_file():
        return _transformers(path)
    if path.is_dir() and not (path / "config.yaml").is_file():
        raise RunError(
            f"{path}: expected the directory of a run (with config.yaml), a checkpoint, or a "
            "directory that save_pretrained of transformers wrote (with config.json)"
        )
    file = checkpoint_file(path, which)
    checkpoint = read_checkpoint(file)
    if checkpoint[MARK]["run"].get("task") == "finetuning":
        from espformer.lab.training.pretrained import load_classifier

        model = load_classifier(file)
        config: Any = model.encoder.config
        return Exportable(
            model,
            {"inputs": "ids", "mask": "mask"},
            vocabulary=int(config.vocab_size),
            longest=getattr(config, "max_position_embeddings", None),
        )
    return _run(file, checkpoint)


def _run(file: Path, checkpoint: dict[str, Any]) -> Exportable:
    from espformer.lab.training.assemble import load_task, load_weights, make_model
    from espformer.lab.training.posttrain import open_checkpoint

    run, _ = open_checkpoint(file)
    if run.task == "translation":
        raise RunError(
            f"{file}: a translator writes word by word, which is no single graph; classifiers can "
            "be exported"
        )
    results = file.parent / "results.json"
    if results.exists():
        # The data themselves are not needed: a finished run remembers what the model was told.
        advice = "move it away, and the data themselves are read instead"
        info = _read_json(results, advice).get("data")
        if not isinstance(info, dict):
            raise RunError(
                f"{results}: expected the results of a run, which tell about its data; {advice}"
            )
        last: Tensor = next(x for x in reversed(checkpoint["state_dict"].values()) if x.dim() == 1)
        classes = len(info["class_names"]) if "class_names" in info else len(last)
        nothing: Any = []
        task = Task(run.data.set.name, nothing, nothing, classes=classes, info=info)
    else:
        task = load_task(run)
    model = make_model(run, task).eval()
    load_weights(model, checkpoint["state_dict"], str(file))
    if "vocabulary_size" in task.info:
        words = int(task.info["vocabulary_size"])
        inputs = {"inputs": "ids", "mask": "mask"}
        return Exportable(model, inputs, words, longest=int(task.info["max_length"]))
    if "image_size" in task.info:
        size = int(task.info["image_size"])
        image = (int(task.info["channels"]), size, size)
        return Exportable(model, {"inputs": "images"}, image=image)
    return Exportable(model, {"inputs": "points"})


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(
            f"{path}: cannot be read, it is cut off or damaged ({error}); restore it, or {advice}"
        ) from None
    if not isinstance(found, dict):
        raise RunError(f"{path}: expected names and values; restore it, or {advice}")
    return found


def _transformers(path: Path) -> Exportable:
    import transformers

    raw = _read_json(path / "config.json", "save the model again")
    name = next(iter(raw.get("architectures") or []), "AutoModel")
    kind = getattr(transformers, name, None) or _part_of_transformers(name, raw)
    if kind is None:
        raise RunError(f"{path}: this version of transformers has no {name}")
    decoder = raw.get("is_encoder_decoder") and not name.endswith("Encoder")
    if decoder or ("decoder" in raw and "encoder" in raw):
        raise RunError(
            f"{path}: {name} writes word by word, which is no single graph; save its encoder "
            "(model.get_encoder().save_pretrained(...)) and export that"
        )
    model = _load(kind, path, converted=_has_entry(raw)).eval()
    config: Any = model.config
    # A tuple has the same outputs in every exporter, and no cache among them.
    config.return_dict = False
    if hasattr(config, "use_cache"):
        config.use_cache = False
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        config = getattr(config, "vision_config", config)
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        image = (int(config.num_channels), int(height), int(width))
        return Exportable(model, {"pixel_values": "images"}, image=image)
    if main != "input_ids" or hasattr(config, "vision_config"):
        raise RunError(
            f"{path}: {name} takes {main}, for which there is no example here; export a part of it "
            "that takes words or images, or call espformer.integrations.onnx.export_onnx with an "
            "example"
        )
    # Positions of RoBERTa begin after the padding token.
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and "roberta" in str(config.model_type):
        longest -= int(config.pad_token_id) + 1
    inputs = {"input_ids": "ids", "attention_mask": "integer_mask"}
    return Exportable(model, inputs, int(config.vocab_size), longest=longest)


def _part_of_transformers(name: str, raw: dict[str, Any]) -> Any:
    """Find a class that transformers does not export, such as the encoder of BART."""
    family = str(raw.get("model_type", "")).replace("-", "_")
    with contextlib.suppress(ImportError):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        return getattr(module, name, None)
    return None


def _has_entry(raw: Any) -> bool:
    """Whether a configuration, or one of a part, tells of a conversion."""
    if not isinstance(raw, dict):
        return False
    entry = raw.get("espformer")
    here = isinstance(entry, dict) and "modules" in entry
    return here or any(_has_entry(part) for part in raw.values())


def _load(kind: Any, path: Path, *, converted: bool) -> nn.Module:
    """Load a saved model; a pooler that was left out when it was saved stays out.

    transformers makes such parts anew, with random weights, and says so in a table.
    """
    from espformer.integrations.pretrained import load_pretrained
    from espformer.integrations.transformers import building_original

    def load(**options: Any) -> tuple[nn.Module, set[str]]:
        options |= {"dtype": torch.float32, "output_loading_info": True}
        with building_original() if converted else contextlib.nullcontext():
            model, info = kind.from_pretrained(path, **options)
        return model, set(info["missing_keys"])

    options: dict[str, Any] = {}
    try:
        missing = load()[1]
        if missing and all("pooler" in name.split(".") for name in missing):
            options = {"add_pooling_layer": False}
            missing = load(**options)[1]
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise RunError(
                f"{path}: it has no weights for {some}, which would be random; save the model that "
                "was trained"
            )
        if converted:
            return load_pretrained(kind, str(path), dtype=torch.float32, **options)
        return load(**options)[0]
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: {in_one_line(error)}") from None


def export_model(
    source: Exportable,
    path: Path,
    form: str,
    *,
    soft: bool = False,
    tolerance: float = TOLERANCE,
) -> float:
    """Write the graph of a model and compare it with the model, at sizes it was not made with too.

    The file is written only if the outputs agree; otherwise an existing file is kept.

    Args:
        source: the model.
        path: of the file.
        form: "onnx" or "torch" (``torch.export``).
        soft: keep the soft sort; else ESP attention sorts exactly, as :func:`espformer.harden`.
        tolerance: largest difference that is accepted. A sharp soft sort needs more than others: it
            divides rounding errors by its temperature.

    Returns:
        The largest difference of an output from the model's.

    Raises:
        RunError: the graph cannot be made or written, or computes something else.
    """
    model = source.model.eval()
    if any(isinstance(module, ESP) for module in model.modules()):
        (soften if soft else harden)(model)
    with _replacing(path, "onnx" if form == "onnx" else "pt2") as file:
        _write(source, file, form, soft)
        return _compare(source, file, form, tolerance)


@contextlib.contextmanager
def _replacing(path: Path, suffix: str) -> Iterator[Path]:
    """Yield a file to write in a directory of its own; it replaces `path` when the block ends well.

    The graph of a large model has its weights in a file beside it, whose name it knows.
    """
    if path.is_dir():
        raise RunError(f"{path}: is a directory; name the file, such as {path / f'model.{suffix}'}")
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
                )
            )
        except OSError as error:
            raise RunError(
                f"{path}: cannot write here ({error.strerror}); choose another place with --to"
            ) from None
        yield folder / path.name
        # The graph comes last: what it refers to is there before it.
        for made in sorted(folder.iterdir(), key=lambda made: made.name == path.name):
            os.replace(made, path.parent / made.name)


def _write(source: Exportable, path: Path, form: str, soft: bool) -> None:
    example = source.example(*EXAMPLE)
    options: dict[str, Any] = {"dynamic_length": source.has_length}
    # It tells about operators of packages that are not there.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*")
    try:
        if form == "onnx":
            export_onnx(source.model, example, path, tolerance=None, **options)
        else:
            program = export_program(source.model, example, **options)
            torch.export.save(program, path)
    except ImportError as error:
        raise RunError(str(error)) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise RunError(
                f"{path.name}: could not be written ({error.strerror}); make room, or choose "
                "another place with --to"
            ) from error
        advice = "; a hardened model is easier to export, leave --soft out" if soft else ""
        refusal = f"{form}: the exporter refused this model: {first_line(error)}{advice}"
        raise RunError(refusal) from error


def _compare(source: Exportable, path: Path, form: str, tolerance: float) -> float:
    """Return the largest difference of a file from the model; refused above the tolerance."""
    sizes = [EXAMPLE, *OTHERS] if source.has_length else [EXAMPLE, (1, 0), (3, 0)]
    worst = 0.0
    measure = onnx_difference if form == "onnx" else _program_difference
    for number, (batch, length) in enumerate(sizes):
        for attempt in range(ATTEMPTS):
            inputs = source.example(batch, max(length, 1), seed=number + len(sizes) * attempt)
            found = measure(source.model, inputs, path)
            if found <= tolerance:
                break
        if not found <= tolerance:
            raise RunError(
                f"{path.name}: for batch {batch} and length {length} its output is {found:.2e} "
                f"away from the model's, more than {tolerance:.0e}; it was not kept. If so much "
                "is good enough, say so with --tolerance"
            )
        worst = max(worst, found)
    return worst


def _program_difference(model: nn.Module, inputs: dict[str, Tensor], path: Path) -> float:
    with torch.no_grad():
        wanted = tree_leaves(model(**inputs))
        found = tree_leaves(torch.export.load(path).module()(**inputs))
    return max(
        float((a - b).abs().max())
        for a, b in zip(found, wanted, strict=True)
        if isinstance(a, Tensor)
    )
