"""Training steps on tweets, padded and packed: ``python -m benchmarks.packed_step``.

The text classifier of the recipe `tweeteval` (6 blocks of 8 heads, 256 wide, bfloat16 by autocast
on a GPU, Adam), on batches of real tweets: padded to the maximum length of the data set, padded to
the longest tweet of the batch, and packed. All three take turns on the same batches, and their
losses are compared. If the tweets are not found, lengths are drawn at random (log-normal, median 20
tokens), and the table says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import find_device, make_parser
from benchmarks.measure import print_table, write_results
from espformer.lab.bench.tables import file_stem
from espformer.lab.clock import interleaved_seconds
from espformer.lab.data import load
from espformer.lab.machine import machine
from espformer.models import TextClassifier
from espformer.nn import ESP, Sinkhorn, Softmax

MECHANISMS: dict[str, Callable[[], Any]] = {
    "softmax": Softmax,
    "Sinkhorn S = 3": lambda: Sinkhorn(iterations=3),
    "ESP, defaults": ESP,
}
WAYS = ("to 128 tokens", "to the longest of a batch", "packed")
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}


@dataclass(frozen=True)
class Row:
    """Time and memory of a training step with one kind of batches."""

    attention: str
    batch: int
    padding: str
    tokens_a_step: str
    milliseconds: str
    steps_per_second: str
    times_packed: str
    loss_error: str

    @property
    def failed(self) -> bool:
        return self.loss_error.startswith("FAILED")


def tweets(data_dir: str | None) -> tuple[Tensor, int, str]:
    """Token ids of the training tweets, (tweets, 128), the size of the vocabulary, and a name."""
    try:
        task = load("tweeteval", data_dir=data_dir, classes=2)
        return task.tensors["train"].inputs, int(task.info["vocabulary_size"]), "TweetEval"
    except (OSError, ValueError, ImportError) as error:
        print(f"no tweets ({error}); lengths are drawn", file=sys.stderr)
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randn(4096, generator=draw) * 0.5 + 3).exp().clamp(2, 128).long()
    ids = torch.randint(4, 16_000, (4096, 128), generator=draw)
    return ids.masked_fill(torch.arange(128) >= lengths.unsqueeze(-1), 0), 16_000, "drawn lengths"


def trainer(
    mechanism: Any, way: str, batches: list[Tensor], vocabulary: int, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """The losses of the first batch, and a function that trains on all batches once."""
    torch.manual_seed(0)
    model = TextClassifier(vocabulary=vocabulary, mechanism=mechanism, packed=way == "packed")
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    if way != WAYS[0]:
        batches = [ids[:, : int((ids != 0).sum(-1).max())].contiguous() for ids in batches]
    labels = [ids[:, 0] % 2 for ids in batches]

    def loss(ids: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return F.cross_entropy(model(ids).float(), target)

    def first() -> Tensor:
        model.eval()
        with torch.no_grad():
            found = loss(batches[0], labels[0])
        model.train()
        return found

    def learn() -> None:
        for ids, target in zip(batches, labels, strict=True):
            optimizer.zero_grad()
            loss(ids, target).backward()
            optimizer.step()

    return first, learn


def main() -> None:
    parser = make_parser("packed_step", __doc__)
    parser.add_argument("--device", default="cuda", help="or cpu")
    parser.add_argument("--data-dir", help="where tweeteval_sentiment/ lies")
    parser.add_argument("--batches", type=int, default=10, help="batches of a turn")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256], help="tweets of a step")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every kind of padding")
    parser.add_argument("--no-save", action="store_true", help="print, and write no results")
    options = parser.parse_args()
    device = find_device(parser, options.device)
    ids, vocabulary, source = tweets(options.data_dir)
    stated = machine(["python", "-m", "benchmarks.packed_step", *sys.argv[1:]], device)
    stated |= {"model": "TextClassifier()", "texts": source}
    title = "Training steps on tweets, padded and packed"
    rows: list[Row] = []
    for size in options.batch:
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        chosen = ids[order[: size * options.batches]].to(device, torch.long)
        batches = list(chosen.split(size))
        for name, make in MECHANISMS.items():
            rows += measure(name, make, batches, vocabulary, device, options.rounds)
            times = ", ".join(f"{row.padding} {row.milliseconds}" for row in rows[-len(WAYS) :])
            print(f"{name}, {size} tweets a step, ms: {times}", flush=True)
            if not options.no_save:  # save now, in case the rest is interrupted
                write_results(file_stem("packed-step", device), title, rows, stated)
    print_table(rows, stated)
    if any(row.failed for row in rows):
        raise SystemExit(1)


def measure(
    name: str, make: Callable[[], Any], batches: list[Tensor], vocabulary: int,
    device: torch.device, rounds: int,
) -> list[Row]:  # fmt: skip
    """The rows of one attention."""
    pairs = [trainer(make(), way, batches, vocabulary, device) for way in WAYS]
    losses = [float(first()) for first, _ in pairs]
    times = interleaved_seconds([learn for _, learn in pairs], rounds, device=device)
    true_tokens = sum(int((ids != 0).sum()) for ids in batches)
    longest = sum(len(ids) * int((ids != 0).sum(-1).max()) for ids in batches)
    tokens = (sum(ids.numel() for ids in batches), longest, true_tokens)
    rows = []
    for way, loss, seconds, count in zip(WAYS, losses, times, tokens, strict=True):
        error = abs(loss - losses[0]) / abs(losses[0])
        right = error <= TOLERANCE[device.type]
        step = seconds / len(batches)
        rows.append(
            Row(
                name,
                len(batches[0]),
                way,
                f"{count / len(batches):.0f}",
                f"{1e3 * step:.2f}",
                f"{1 / step:.1f}",
                f"{seconds / times[-1]:.2f}",
                f"{error:.1e}" if right else f"FAILED: {error:.1e}",
            )
        )
    return rows


if __name__ == "__main__":
    main()
