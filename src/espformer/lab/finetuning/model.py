"""A pre-trained encoder with another attention, and a linear head on its mean hidden state."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espformer.integrations import convert
from espformer.lab.data import Task, TensorSet
from espformer.lab.finetuning.config import MODEL, FinetuneRun, run_from_plain
from espformer.lab.training.assemble import load_weights
from espformer.lab.training.checkpoints import read_checkpoint
from espformer.lab.training.errors import RunError
from espformer.lab.training.learner import MARK
from espformer.lab.training.specs import build_mechanism

__all__ = [
    "PooledClassifier",
    "fit_head",
    "load_classifier",
    "load_encoder",
    "load_tokenizer",
    "make_model",
    "pooled_features",
    "weights_info",
]

# Weight of ½‖W‖² beside the mean cross-entropy of standardised features.
HEAD_PENALTY = 1e-3


class PooledClassifier(nn.Module):
    """``(batch, tokens)`` token ids to logits: the mean hidden state of tokens that take part.

    Args:
        encoder: a model of transformers.
        classes: number of classes.
    """

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(int(encoder.config.hidden_size), classes)  # type: ignore[union-attr, arg-type]

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.pool(inputs, mask))
        return logits

    def pool(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(batch, width)``, the mean over the tokens that take part."""
        if mask is None:
            mask = torch.ones_like(inputs)
        states: Tensor = self.encoder(input_ids=inputs, attention_mask=mask.long())[0]
        present = mask.unsqueeze(-1).to(states.dtype)
        return (states * present).sum(1) / present.sum(1).clamp(min=1)


def load_encoder(path: str) -> nn.Module:
    """The encoder of a directory or of a name on the hub, in float32 whatever it is stored in."""
    from transformers import AutoModel

    try:
        # The pooler's output is not used: its weights would only take part in the decay.
        model: nn.Module = AutoModel.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: no model of transformers could be loaded: {_short(error)}"
        ) from None
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, nn.Module):
        model.pooler = None  # type: ignore[assignment]
    return model


def load_tokenizer(path: str) -> Any:
    """The tokenizer that lies beside the encoder."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        embedded = getattr(AutoConfig.from_pretrained(path), "vocab_size", 0)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: no tokenizer could be loaded: {_short(error)}") from None
    # Where its files are missing transformers makes one of special tokens alone, and every word is
    # unknown. Embeddings may have some rows more than there are tokens, to be a round number.
    if 2 * len(tokenizer) < embedded:
        raise RunError(
            f"{path}: its tokenizer knows {len(tokenizer)} tokens and the model {embedded:,}: the "
            "tokenizer's files are not there, or are another model's. Put them there with "
            f"AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained({path!r})"
        )
    return tokenizer


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def make_model(run: FinetuneRun, classes: int, head: dict[str, Tensor] | None) -> PooledClassifier:
    """The classifier of a run: softmax is the encoder as it is, anything else is put into it."""
    model = PooledClassifier(load_encoder(run.path), classes)
    if head is not None:
        model.head.load_state_dict(head)
    if run.mechanism.name != "softmax" or run.mechanism.arguments:
        try:
            convert(model.encoder, build_mechanism(run.mechanism))
        except ValueError as error:
            raise RunError(f"{run.path}: {error}") from None
    # transformers loads models in evaluation mode, and Lightning trains them in the mode they have.
    return model.train()


def load_classifier(directory: str | Path, which: str = "last") -> PooledClassifier:
    """The classifier that a finished fine-tuning left in its directory, in evaluation mode.

    Args:
        directory: of the run, such as
            ``runs/finetune-all-MiniLM-L6-v2-tweeteval/lr-0.0001/esp/seed-0``, or one of its
            checkpoints.
        which: "last", as it was trained, or "hard".

    Returns:
        Its ``encoder`` is a model of transformers, with ``save_pretrained``.
    """
    path = Path(directory)
    file = path / f"{which}.ckpt" if path.is_dir() else path
    checkpoint = read_checkpoint(file)
    run = run_from_plain(checkpoint[MARK]["run"], str(file))
    if run.model.name != MODEL:
        raise RunError(f"{file}: is no fine-tuning of a pre-trained model")
    classes = len(checkpoint["state_dict"]["model.head.bias"])
    model = make_model(run, classes, None)
    load_weights(model, checkpoint["state_dict"], str(file))
    return model.eval()


@torch.no_grad()
def pooled_features(
    model: PooledClassifier, data: TensorSet, device: torch.device, batch_size: int = 256
) -> Tensor:
    """``(examples, width)`` on the CPU; texts of like length share a batch."""
    model = model.to(device).eval()
    assert data.lengths is not None
    order = torch.argsort(data.lengths, stable=True)
    features = torch.empty(len(data), model.head.in_features)
    for rows in order.split(batch_size):
        batch = data.batch(rows)
        found = model.pool(batch["inputs"].to(device), batch["mask"].to(device))
        features[rows] = found.float().cpu()
    return features


def fit_head(features: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """The state of a linear head: multinomial logistic regression on standardised features.

    The minimum of mean cross-entropy + ½·penalty·‖W‖², which is unique; the standardisation is
    folded into weight and bias.
    """
    x = features.double()
    mean, deviation = x.mean(0), x.std(0).clamp(min=1e-6)
    x = (x - mean) / deviation
    weight = torch.zeros(classes, x.shape[1], dtype=x.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(x @ weight.T + bias, labels)
        value = value + 0.5 * HEAD_PENALTY * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    folded = weight.detach() / deviation
    return {"weight": folded.float(), "bias": (bias.detach() - folded @ mean).float()}


def head_for(run: FinetuneRun, task: Task, device: torch.device) -> dict[str, Tensor]:
    """The head that all attentions begin with: fitted with the model as it was published."""
    assert isinstance(task.train, TensorSet)
    assert task.classes is not None
    model = PooledClassifier(load_encoder(run.path), task.classes)
    features = pooled_features(model, task.train, device)
    return fit_head(features, task.train.labels, task.classes)


def weights_info(path: str) -> dict[str, Any]:
    """What the results say about the weights: their checksum, and the type they are stored in."""
    file = Path(path) / "model.safetensors"
    if not file.is_file():
        return {"path": path}
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        stream.seek(0)
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    stored = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    kinds = sorted(kind for kind in stored if not kind.startswith(("I", "U")))
    return {"path": path, "sha256": digest, "stored_in": kinds}
