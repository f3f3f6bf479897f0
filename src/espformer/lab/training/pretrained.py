"""A pre-trained encoder with another attention, a linear head on it, and texts for both."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from espformer.integrations import convert
from espformer.lab.data import Task, TensorSet, imdb, tweeteval
from espformer.lab.data.base import hold_out
from espformer.lab.data.files import DataError, find, sha256
from espformer.lab.data.text import Texts
from espformer.lab.errors import RunError, in_one_line
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.recipe import run_from_plain
from espformer.lab.recipes.schema import FinetuneRun
from espformer.lab.recipes.yaml_schema import Spec
from espformer.lab.training.assemble import load_weights
from espformer.lab.training.checkpoints import checkpoint_file, read_checkpoint
from espformer.lab.training.events import Lines
from espformer.lab.training.learner import MARK

# Weight of ½‖W‖² beside the mean cross-entropy of standardised features.
HEAD_PENALTY = 1e-3
TEXTS: dict[str, Any] = {"tweeteval": tweeteval, "imdb": imdb}
# Where the published set has no validation split: this share of the training texts.
HELD_OUT = 0.04


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

    import espformer.integrations.transformers  # noqa: F401, refuses to load softmax for ESP

    try:
        # The pooler's output is not used: its weights would only take part in the decay.
        model: nn.Module = AutoModel.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: no model of transformers could be loaded: {in_one_line(error)}"
        ) from None
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, nn.Module):
        model.pooler = None  # type: ignore[assignment]
    return model


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer that lies beside the encoder."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        embedded = getattr(AutoConfig.from_pretrained(path), "vocab_size", 0)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: no tokenizer could be loaded: {in_one_line(error)}") from None
    # Where its files are missing transformers makes one of special tokens alone, and every word is
    # unknown. Embeddings may have some rows more than there are tokens, to be a round number.
    if 2 * len(tokenizer) < embedded:
        raise RunError(
            f"{path}: its tokenizer knows {len(tokenizer)} tokens and the model {embedded:,}: the "
            "tokenizer's files are not there, or are another model's. Put them there with "
            f"AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained({path!r})"
        )
    return tokenizer


def make_classifier(run: FinetuneRun, classes: int) -> PooledClassifier:
    """The classifier of a run: softmax is the encoder as it is, anything else is put into it."""
    model = PooledClassifier(load_encoder(run.path), classes)
    if run.mechanism != Spec("softmax"):
        try:
            convert(model.encoder, build_mechanism(run.mechanism))
        except ValueError as error:
            raise RunError(f"{run.path}: {error}") from None
    # transformers loads models in evaluation mode, and Lightning trains them in the mode they have.
    return model.train()


def load_classifier(directory: str | Path, which: str = "last") -> PooledClassifier:
    """Return the classifier that a finished fine-tuning left in its directory, in evaluation mode.

    Args:
        directory: of the run, such as
            ``runs/finetune-all-MiniLM-L6-v2-tweeteval/lr-0.0001/esp/seed-0``, or one of its
            checkpoints.
        which: "last", as it was trained, or "hard".

    Returns:
        Its ``encoder`` is a model of transformers, with ``save_pretrained``.
    """
    file = checkpoint_file(Path(directory), which)
    checkpoint = read_checkpoint(file)
    run = run_from_plain(checkpoint[MARK]["run"], str(file))
    if not isinstance(run, FinetuneRun):
        raise RunError(f"{file}: is no fine-tuning of a pre-trained model")
    classes = len(checkpoint["state_dict"]["model.head.bias"])
    model = make_classifier(run, classes)
    load_weights(model, checkpoint["state_dict"], str(file))
    return model.eval()


@torch.no_grad()
def pooled_features(model: PooledClassifier, data: TensorSet, device: torch.device) -> Tensor:
    """``(examples, width)`` on the CPU; texts of like length share a batch."""
    model = model.to(device).eval()
    assert data.lengths is not None
    order = torch.argsort(data.lengths, stable=True)
    features = torch.empty(len(data), model.head.in_features)
    lines, done = Lines(), 0
    for rows in order.split(256):
        batch = data.batch(rows)
        found = model.pool(batch["inputs"].to(device), batch["mask"].to(device))
        features[rows] = found.float().cpu()
        done += len(rows)
        lines.break_silence(f"features of {done:,} of {len(data):,} texts")
    return features


def fit_head(features: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """Return the state of a linear head: multinomial logistic regression on standardised features.

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
    """Return the head that all attentions begin with: fitted with the model as it was published."""
    assert isinstance(task.train, TensorSet)
    assert task.classes is not None
    model = PooledClassifier(load_encoder(run.path), task.classes)
    features = pooled_features(model, task.train, device)
    return fit_head(features, task.train.labels, task.classes)


def weights_info(path: str) -> dict[str, Any]:
    """Describe the weights for the results: their checksum, and the type they are stored in."""
    file = Path(path) / "model.safetensors"
    if not file.is_file():
        return {"path": path}
    with safe_open(file, "pt") as weights:
        stored = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    kinds = sorted(kind for kind in stored if not kind.startswith(("I", "U")))
    return {"path": path, "sha256": sha256(file), "stored_in": kinds}


def load_texts(run: FinetuneRun) -> Task:
    """Read labelled texts as token ids of the model's own tokenizer.

    They are the same for every seed, which decides about batches alone.
    """
    texts = TEXTS[run.data.set.name]
    source, names = texts.SOURCE, texts.NAMES
    tokenizer = load_tokenizer(run.path)
    try:
        files = find(source, run.data.directory)
        sets = {
            split: _encoded(texts.read(files, split), tokenizer, run.max_length)
            for split in source.splits
        }
    except (DataError, OSError, ImportError) as error:
        raise RunError(str(error)) from error
    found = {split: len(data) for split, data in sets.items()}
    if "valid" not in sets:
        sets["train"], held = hold_out(sets["train"], HELD_OUT, seed=0)
        assert held is not None
        sets["valid"] = held
    if run.examples is not None:
        sets = {split: _some(data, run.examples) for split, data in sets.items()}
    info = files.info({split: len(data) for split, data in sets.items()}, found)
    if run.examples is not None:
        info["differences"].append(f"only {run.examples} examples of each split were used")
    stored = weights_info(run.path).get("stored_in", ["F32"])
    if stored != ["F32"]:
        info["differences"].append(f"the model's weights were stored in {' and '.join(stored)}")
    counts = torch.bincount(sets["test"].labels, minlength=len(names))
    return Task(
        name=source.name,
        train=sets["train"],
        valid=sets["valid"],
        test=sets["test"],
        classes=len(names),
        info={
            **info,
            "class_names": names,
            "max_length": run.max_length,
            "tokenizer": type(tokenizer).__name__,
            "vocabulary_size": len(tokenizer),
            "largest_class_percent": 100 * float(counts.max() / counts.sum()),
        },
    )


def _encoded(split: Texts, tokenizer: Any, max_length: int) -> TensorSet:
    texts, labels = split
    ids = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    rows = [torch.tensor(row, dtype=torch.int32) for row in ids]
    padded = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    return TensorSet(padded, labels, torch.tensor([len(row) for row in ids]))


def _some(data: TensorSet, count: int) -> TensorSet:
    """Choose so many examples, spread over the set, since files may be sorted by class."""
    if len(data) <= count:
        return data
    return data.subset(torch.arange(count) * len(data) // count)
