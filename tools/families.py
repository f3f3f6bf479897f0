"""Try to convert every model class of the installed transformers, and write docs/families.md.

    python tools/families.py                      # every class, some minutes
    python tools/families.py --only bert,vit      # families whose model type contains one of these

Each class that `AutoModel` knows, and every other model of transformers that is called `...Model`
or `...Encoder`, is built with a tiny configuration and run. Then it is converted. With softmax as a
mechanism, plain and inside `Packed`, its output must stay what it was: heads, scale, masks and
positions are what `convert` takes them for. With ESP, every module that the report calls converted
and that is run must have called its mechanism, none may have computed a softmax, and the output
must be another one. A class that fails any of this is *wrong*, and there must be none.
"""

import argparse
import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import espformer
from espformer.integrations import ConversionReport, conversion_report
from espformer.integrations.candidates import ASSUMED_CAUSAL, CAUSAL
from espformer.nn import ESP, Mechanism, Packed, Softmax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tools.tiny_models import build, classes, outputs, runnable  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
SAME = 1e-3  # of an output's largest number


@dataclass(frozen=True)
class Row:
    """The outcome for one class.

    Attributes:
        family: the model type of its configuration.
        name: the class.
        verdict: "supported", "refused", "causal", "no attention", "wrong" or "not tried".
        detail: how many attention modules were converted and why others were left, or why not.
    """

    family: str
    name: str
    verdict: str
    detail: str = ""


class Watch:
    """Counts calls of mechanisms, and of softmax inside of converted modules."""

    def __init__(self, model: nn.Module, converted: list[str]) -> None:
        self.run: set[str] = set()
        self.called: set[str] = set()
        self.softmax: set[str] = set()
        self.most_tokens = 0
        self.inside: list[str] = []
        for name in converted:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            mechanism = module.mechanism
            assert isinstance(mechanism, Mechanism)
            mechanism.register_forward_pre_hook(
                lambda _, args, name=name: self._call(name, args[0].shape[2])
            )

    def _enter(self, name: str) -> None:
        self.run.add(name)
        self.inside.append(name)

    def _call(self, name: str, tokens: int) -> None:
        self.called.add(name)
        self.most_tokens = max(self.most_tokens, tokens)

    def _leave(self) -> None:
        self.inside.pop()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        places = [
            (torch, "softmax"),
            (torch.Tensor, "softmax"),
            (nn.functional, "softmax"),
            (nn.functional, "scaled_dot_product_attention"),
            (nn.functional, "multi_head_attention_forward"),
        ]
        originals = [getattr(place, name) for place, name in places]

        def watched(original: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                # ESP itself takes a softmax, over slices.
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if self.inside and not caller.startswith("espformer"):
                    self.softmax.add(self.inside[-1])
                return original(*args, **options)

            return call

        try:
            for (place, name), original in zip(places, originals, strict=True):
                setattr(place, name, watched(original))
            yield
        finally:
            for (place, name), original in zip(places, originals, strict=True):
                setattr(place, name, original)


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, as a share of the largest number."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return float("inf")
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))
        for a, b in zip(found, wanted, strict=True)
        if a.numel()
    )


def judge(cls: type[Any]) -> Row:
    """Convert a class and say what became of it."""
    family = str(cls.config_class.model_type)
    try:
        model = build(cls, meta=True)
        try:
            espformer.convert(model, Softmax())
        except ValueError as error:
            return refused(family, cls, model, error)
        model, given, before = runnable(cls)
        if changes := difference(outputs(model, given), before):
            raise ValueError(f"two runs of the original differ, by {changes:.1e}")
    except Exception as error:
        reason = " ".join(str(error).split())[:90]
        return Row(family, cls.__name__, "not tried", f"{type(error).__name__}: {reason}")
    try:
        same, tokens, report = converted_difference(model, given, before)
        back = difference(outputs(espformer.revert(model), given), before)
        note = ""
        mask = given.get("attention_mask")
        if SAME < same < float("inf") and mask is not None and tokens <= SAME:
            # Outputs that are not one per token may read padded ones: SigLIP's last one.
            given = given | {"attention_mask": torch.ones_like(mask)}
            before = outputs(model, given)
            same, _, _ = converted_difference(model, given, before)
            espformer.revert(model)
            note = "; run without padding"
        espformer.convert(model, ESP())
        watch = Watch(model, report.converted)
        with watch.watching():
            changed = difference(outputs(model, given), before)
    except Exception as error:
        reason = " ".join(str(error).split())
        return Row(family, cls.__name__, "wrong", f"raises: {reason}")
    problems = []
    if same > SAME:
        problems.append(f"softmax as a mechanism gives another output, by {same:.1e}")
    if back > 1e-6:
        problems.append("revert does not give the original back")
    if watch.run - watch.called:
        problems.append(f"the mechanism was not called in {', '.join(watch.run - watch.called)}")
    if watch.softmax:
        problems.append(f"softmax was called in {', '.join(watch.softmax)}")
    if watch.called and watch.most_tokens < 2:
        problems.append("run on single tokens, which every attention leaves alone")
    elif watch.run and not changed > 1e-6:
        problems.append("ESP does not change the output")
    if problems:
        return Row(family, cls.__name__, "wrong", "; ".join(problems))
    idle = len(set(report.converted) - watch.run)
    if not watch.run:
        return Row(family, cls.__name__, "not tried", "these inputs reach no converted module")
    note += f"; {idle} not reached by these inputs" if idle else ""
    return Row(family, cls.__name__, "supported", summary(report) + note)


def converted_difference(
    model: nn.Module, given: dict[str, Any], before: list[Tensor]
) -> tuple[float, float, ConversionReport]:
    """The distance from the original's outputs, with softmax as mechanism: all, one per token."""
    shape = given["attention_mask"].shape if "attention_mask" in given else None
    chosen = [i for i, x in enumerate(before) if x.shape[:2] == shape]
    same = tokens = 0.0
    for mechanism in (Packed(Softmax()), Softmax()):
        found = outputs(espformer.convert(model, mechanism), given)
        same = max(same, difference(found, before))
        if chosen:
            parts = [found[i] for i in chosen], [before[i] for i in chosen]
            tokens = max(tokens, difference(*parts))
    return same, tokens, conversion_report(model)


def summary(report: ConversionReport) -> str:
    parts = [f"{len(report.converted)} converted"]
    for reason, count in reasons(report).items():
        parts.append(f"{count} left: {short(reason)}")
    return "; ".join(parts)


def reasons(report: ConversionReport) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in report.rows:
        if row.action == "left":
            counts[row.reason] = counts.get(row.reason, 0) + 1
    return counts


def short(reason: str) -> str:
    """Without what follows the first clause."""
    return reason.split(":")[0].split(" (")[0]


def refused(family: str, cls: type[Any], model: nn.Module, error: ValueError) -> Row:
    from espformer.integrations.convert import find_attention

    seen = {str(c.refusal or "cross-attention") for c in find_attention(model)}
    if not seen:
        return Row(family, cls.__name__, "no attention", short(str(error).split("\n")[0]))
    if seen <= {CAUSAL, ASSUMED_CAUSAL}:
        return Row(family, cls.__name__, "causal")
    return Row(family, cls.__name__, "refused", "; ".join(sorted({short(x) for x in seen})))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and logs, and on one thread; afterwards all is as it was."""
    verbosity, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers.logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)


LEGEND = """\
Look for your model by its class or its family. Modules that are *left* keep their attention:

| reason | meaning |
|---|---|
| causal | each token sees earlier tokens only |
| cross-attention | queries and keys are different tokens; `cross=True` converts it |
| local | each token sees only a window around it |
| its model masks | some pairs of tokens must not see each other, such as two images |
| adds a bias of positions to scores | ESP has no scores to add to |
| not a kind of attention that convert knows | the model computes its attention itself |
| its queries and keys are not seen to be the same tokens | pass `cross` to say if they are |

[Plug and play](plug-and-play.md#what-is-not-converted-and-why) says more about them."""


def page(rows: list[Row]) -> str:
    """docs/families.md."""
    count = {v: sum(r.verdict == v for r in rows) for v in {r.verdict for r in rows}}
    lines = [
        "# Families of transformers",
        "",
        "This page is generated by `python tools/families.py` with transformers "
        f"{transformers.__version__}. The script builds",
        "every bare model class with a tiny configuration, runs it, converts it and runs it again. "
        "*Supported*",
        "means four things. With softmax as the mechanism, the output does not change. With ESP, "
        "every module that",
        "the report lists as converted calls ESP and computes no softmax. The output changes. "
        "`revert` restores the",
        "original. A class that is reported as converted but fails any of these is *wrong*.",
        "",
        *LEGEND.splitlines(),
        "",
        "| verdict | classes |",
        "|---|---|",
    ]
    for verdict in ("supported", "refused", "causal", "no attention", "not tried", "wrong"):
        lines.append(f"| {verdict} | {count.get(verdict, 0)} |")
    for verdict, title in (("wrong", "Wrong"), ("supported", "Supported"), ("refused", "Refused")):
        chosen = [row for row in rows if row.verdict == verdict]
        if chosen:
            told = "its attention modules" if verdict == "supported" else "why"
            lines += ["", f"## {title}", "", f"| family | class | {told} |", "|---|---|---|"]
            for row in chosen:
                detail = row.detail.replace("|", "\\|")
                lines.append(f"| {row.family} | {row.name} | {detail} |")
    for verdict, title in (
        ("causal", "Causal throughout, refused"),
        ("no attention", "Without attention"),
    ):
        chosen = [row.name for row in rows if row.verdict == verdict]
        if chosen:
            lines += ["", f"## {title}", "", ", ".join(chosen) + "."]
    chosen = [row for row in rows if row.verdict == "not tried"]
    if chosen:
        lines += [
            "",
            "## Not tried",
            "",
            "The script has no tiny configuration or no inputs for these classes. `convert` "
            "applies the same rules to",
            "them, and `conversion_report` says what it did.",
            "",
            ", ".join(row.name for row in chosen) + ".",
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="parts of names of families, with commas")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    options = parser.parse_args()
    chosen = [part for part in options.only.split(",") if part]
    rows = []
    with quiet():
        for cls in classes():
            family = str(cls.config_class.model_type)
            if chosen and not any(part in family for part in chosen):
                continue
            row = judge(cls)
            rows.append(row)
            told = f"{row.verdict:12s} {row.family:24s} {row.name:32s} {row.detail[:150]}"
            print(told, flush=True)
    wrong = [row for row in rows if row.verdict == "wrong"]
    if not options.dry and not chosen:
        PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{len(rows)} classes, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
