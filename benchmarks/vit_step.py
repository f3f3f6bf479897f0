"""A training step of the paper's ViT by attention: ``python -m benchmarks.vit_step``.

Six layers of 8 heads × 64 over 197 tokens (width 128), a batch of 64 images, bfloat16 by autocast,
Adam: forward, backward and step, called from Python and replayed as a CUDA graph, every attention
in turn. The logits of each are compared with those of the same model in float64.
"""

from __future__ import annotations

import copy
import faulthandler
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import find_device, make_parser
from benchmarks.measure import print_table, write_results
from espformer.lab.bench.cases import largest_error
from espformer.lab.bench.tables import file_stem
from espformer.lab.clock import interleaved_seconds
from espformer.lab.machine import machine
from espformer.lab.training.cuda_graphs import WARM_UP, make_recorder
from espformer.models import VisionTransformer
from espformer.nn import ESP, ClassToken, Mechanism, Sinkhorn, Softmax

MECHANISMS: Mapping[str, Callable[[], Mechanism]] = MappingProxyType(
    {
        "softmax": Softmax,
        "Sinkhorn S = 3": lambda: Sinkhorn(iterations=3),
        "ESP, defaults": ESP,
        "ESP, defaults, class token by softmax": lambda: ClassToken(ESP()),
        "ESP, defaults, learnable slices": lambda: ESP(slicer="learnable", slices=8),
        "ESP, paper": lambda: ESP(
            slicer="axis", temperature_unit="absolute", metric="squared", sort_temperature=1e-3,
            inverse_temperature=0.1,
        ),
    }
)  # fmt: skip
TOLERANCE = 5e-2  # of logits in bfloat16
SINKHORN = "Sinkhorn S = 3"


@dataclass(frozen=True)
class Row:
    """Time and memory of a training step with one attention."""

    attention: str
    milliseconds: str
    times_sinkhorn: str
    as_graph: str
    graph_times_sinkhorn: str
    peak_mb: str
    error: str

    @property
    def failed(self) -> bool:
        return self.error.startswith("FAILED")


def training_step(mechanism: Mechanism, device: torch.device, images: int) -> Callable[[], Tensor]:
    """A step of a fresh model; it returns the loss."""
    torch.manual_seed(0)
    model = VisionTransformer(mechanism=mechanism).to(device)
    inputs = torch.randn(images, 3, 224, 224, device=device)
    labels = torch.randint(2, (images,), device=device)
    graphs = device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=graphs, fused=graphs)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)  # gradients are part of what is recorded
        # Otherwise autocast would reuse casts that were cached before the graph was recorded.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def logit_error(mechanism: Mechanism, device: torch.device) -> float:
    """The relative error of bfloat16 logits against float64 on a CPU, for one image."""
    torch.manual_seed(0)
    model = VisionTransformer(mechanism=mechanism).eval()
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(image.double())
        model = model.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            return largest_error([model(image.to(device)).cpu()], [exact])


def replayed(step: Callable[[], Tensor], device: torch.device) -> Callable[[], object]:
    """The step as a CUDA graph, recorded as training records it."""
    recorder = make_recorder(device)  # a separate memory pool: graphs are replayed in turn

    def work() -> None:
        step()

    for _ in range(WARM_UP):
        recorder.run(work)
    recorded = recorder.record(work)

    def replay() -> Callable[[], Tensor]:
        recorded()
        return step  # the closure keeps the model alive, whose memory the graph reads

    return replay


def main() -> None:
    parser = make_parser("vit_step", __doc__)
    parser.add_argument("--device", default="cuda", help="or cpu, without graphs")
    parser.add_argument("--images", type=int, default=64, help="images of a step")
    parser.add_argument("--rounds", type=int, default=20, help="turns of every attention")
    parser.add_argument(
        "--only", help=f"some attentions, separated by semicolons: {'; '.join(MECHANISMS)}"
    )
    parser.add_argument("--no-save", action="store_true", help="print, and write no results")
    options = parser.parse_args()
    faulthandler.enable()  # print a traceback if a driver crashes
    device = find_device(parser, options.device)
    on_gpu = device.type == "cuda"
    names = options.only.split(";") if options.only else list(MECHANISMS)
    errors: dict[str, float] = {}
    steps, graphs, peaks = {}, {}, {}
    for name in names:
        errors[name] = logit_error(MECHANISMS[name](), device)
        print(f"{name}: logits within {errors[name]:.1e}", file=sys.stderr, flush=True)
        steps[name] = training_step(MECHANISMS[name](), device, options.images)
        steps[name]()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            steps[name]()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e6
            fresh = training_step(MECHANISMS[name](), device, options.images)
            graphs[name] = replayed(fresh, device)
    eager = dict(zip(names, timed(steps, names, device, options.rounds), strict=True))
    graph = dict(zip(names, timed(graphs, names, device, options.rounds), strict=True))
    rows = []
    for name in names:
        right = errors[name] <= TOLERANCE
        rows.append(
            Row(
                name,
                f"{eager[name]:.2f}" if right else "",
                ratio(eager, name) if right else "",
                f"{graph[name]:.2f}" if right and on_gpu else "",
                ratio(graph, name) if right and on_gpu else "",
                f"{peaks[name]:.0f}" if on_gpu else "",
                f"{errors[name]:.1e}" if right else f"FAILED: {errors[name]:.1e}",
            )
        )
    stated = machine(["python", "-m", "benchmarks.vit_step", *sys.argv[1:]], device)
    stated["model"] = f"VisionTransformer(), {options.images} images of 224 × 224 a step"
    print_table(rows, stated)
    if not options.no_save:
        write_results(
            file_stem("vit-step", device), "A training step of the paper's ViT", rows, stated
        )
    if any(row.failed for row in rows):
        raise SystemExit(1)


def timed(
    calls: Mapping[str, Callable[[], object]], names: list[str], device: torch.device, rounds: int
) -> list[float]:
    """The milliseconds of every call; NaN if there are no calls."""
    if not calls:
        return [float("nan")] * len(names)
    found = interleaved_seconds(
        [calls[name] for name in names], rounds, device=device, warm_up=3,
        counts=[5 if device.type == "cuda" else 1] * len(names),
    )  # fmt: skip
    return [1e3 * seconds for seconds in found]


def ratio(times: Mapping[str, float], name: str) -> str:
    return f"{times[name] / times[SINKHORN]:.2f}" if SINKHORN in times else ""


if __name__ == "__main__":
    main()
