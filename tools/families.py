"""Try to convert every model class of the installed transformers, and write docs/families.md.

    python tools/families.py                      # every class, some minutes
    python tools/families.py --only bert,vit      # families whose model type contains one of these

Each class that `AutoModel` knows, and every other model of transformers that is called `...Model`
or `...Encoder`, is built with a tiny configuration and run. Then it is converted twice. With
softmax as a mechanism its output must stay what it was: heads, scale, masks and positions are what
`convert` takes them for. With ESP, every module that the report calls converted and that is run
must have called its mechanism, none may have computed a softmax, and the output must be another
one. A class that fails any of this is *wrong*, and there must be none.
"""

import argparse
import contextlib
import importlib
import inspect
import logging
import pkgutil
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
from espformer.nn import ESP, Mechanism, Softmax

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
LARGEST = 40_000_000  # parameters of a configuration that is small enough to be run
BATCH, TOKENS = 2, 12
SAME = 1e-3  # of an output's largest number

# What sizes are called in configurations, and how small they are made.
WIDTH, HEADS, LAYERS = 32, 2, 2


def named(size: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


SIZES: dict[str, Any] = {
    **named(
        WIDTH,
        "hidden_size d_model dim emb_dim embed_dim n_embd embedding_size encoder_hidden_size "
        "decoder_hidden_size projection_dim hidden_dim conv_dim_out output_dim text_embed_dim "
        "feature_size codebook_dim encoder_embed_dim decoder_embed_dim vision_hidden_size "
        "proj_dim adapter_out_dim projector_hidden_size rnn_hidden_size text_hidden_size "
        "d_latents qk_channels v_channels out_hidden_size fusion_hidden_size",
    ),
    **named(
        HEADS,
        "num_attention_heads num_heads n_heads n_head encoder_attention_heads attention_heads "
        "decoder_attention_heads num_key_value_heads num_encoder_attention_heads "
        "num_decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
        "num_self_attention_heads num_cross_attention_heads vision_num_attention_heads "
        "encoder_num_key_value_heads decoder_num_key_value_heads num_head",
    ),
    **named(
        LAYERS,
        "num_hidden_layers num_layers n_layers n_layer encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers encoder_num_hidden_layers num_blocks "
        "decoder_num_hidden_layers num_hidden_groups text_encoder_layers e_layers "
        "num_self_attends_per_block vision_num_hidden_layers",
    ),
    **named(
        2 * WIDTH,
        "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim d_inner mlp_dim "
        "dim_feedforward ffn_hidden_size inner_dim feed_forward_size ffn_intermediate_size "
        "moe_intermediate_size encoder_feedforward_dim decoder_feedforward_dim "
        "encoder_intermediate_size shared_expert_intermediate_size decoder_intermediate_size",
    ),
    **named(WIDTH // HEADS, "head_dim d_kv attention_head_dim kv_channels"),
    **named(
        64,
        "vocab_size padded_vocab_size text_vocab_size audio_vocab_size num_embeddings "
        "codebook_size max_position_embeddings n_positions max_sequence_length "
        "max_source_positions max_target_positions max_seq_len context_length "
        "max_2d_position_embeddings",
    ),
    "image_size": 32,
    "img_size": 32,
    "input_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "max_source_positions": 10,
    "num_mel_bins": 8,
    "n_mels": 8,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_queries": 5,
    "num_latents": 6,
    "num_detection_tokens": 3,
    "max_length": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "mask_token_id": 3,
    "image_token_id": 5,
    "drop_path_rate": 0.0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "use_timm_backbone": False,
    "add_cross_attention": False,
}


@dataclass(frozen=True)
class Row:
    """What became of one class.

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


def classes() -> Iterator[type[Any]]:
    """Every class of transformers that is a bare model: of AutoModel, ...Model, ...Encoder."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    known = {
        name
        for names in MODEL_MAPPING_NAMES.values()
        for name in (names if isinstance(names, list | tuple) else (names,))
    }
    for package in pkgutil.iter_modules(transformers.models.__path__):
        if package.name in ("auto", "deprecated"):
            continue
        try:
            module = importlib.import_module(
                f"transformers.models.{package.name}.modeling_{package.name}"
            )
        except ImportError:
            continue
        found = (c for c in vars(module).values() if inspect.isclass(c))
        for cls in sorted(found, key=lambda c: c.__name__):
            own = cls.__module__ == module.__name__ and issubclass(
                cls, transformers.PreTrainedModel
            )
            bare = cls.__name__.endswith(("Model", "Encoder")) or cls.__name__ in known
            configured = isinstance(getattr(cls, "config_class", None), type)
            if own and bare and configured and not cls.__name__.endswith("PreTrainedModel"):
                yield cls


def tiny(config: Any) -> Any:
    """The configuration with every size that has a known name made small."""
    for name, value in SIZES.items():
        with contextlib.suppress(Exception):
            given = getattr(config, name, None)
            if isinstance(given, bool) != isinstance(value, bool) or given is None:
                continue
            if isinstance(given, int | float):
                setattr(config, name, value)
            elif isinstance(given, list | tuple) and all(isinstance(x, int) for x in given):
                setattr(config, name, type(given)([value] * len(given)))
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            tiny(part)
    layers = getattr(config, "layer_types", None)
    if isinstance(layers, list):
        config.layer_types = layers[:LAYERS]
    return config


def build(cls: type[Any], *, meta: bool = False) -> nn.Module:
    """The smallest model of a class that its configuration allows, in evaluation mode.

    With `meta` its weights have no numbers, and it may be of any size.
    """
    errors: list[Exception] = []
    for make in (lambda: tiny(cls.config_class()), cls.config_class):
        try:
            with torch.device("meta"):
                model = cls(make()).eval()
            if meta:
                return model
            count = sum(p.numel() for p in model.parameters())
            if count > LARGEST:
                raise ValueError(f"the smallest configuration has {count / 1e6:.0f}M parameters")
            torch.manual_seed(0)
            model = cls(make()).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1 and parameter.is_floating_point():
                        parameter.add_(0.1 * torch.randn_like(parameter))
            return model
        except Exception as error:
            errors.append(error)
    raise errors[0]


def inputs_for(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that a model might take, the likely ones first."""
    generator = torch.Generator().manual_seed(1)
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 32
    side = size if isinstance(size, int) else size[0]
    channels = getattr(vision, "num_channels", None) or 3
    ids = torch.randint(6, 40, (BATCH, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, TOKENS - 4 :] = 0
    images = torch.randn(BATCH, channels, side, side, generator=generator)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 8)
    text = {"input_ids": ids, "attention_mask": mask}
    if "decoder_input_ids" in names:
        text |= {"decoder_input_ids": ids[:, :5]}
    widths = {getattr(config, n, None) for n in ("hidden_size", "d_model", "embed_dim")} - {None}
    width = next((w for w in widths if isinstance(w, int)), WIDTH)
    hidden = torch.randn(BATCH, TOKENS, width, generator=generator)
    sounds = torch.randn(BATCH, 4000, generator=generator)
    features = int(getattr(config, "feature_projection_input_dim", None) or mels or 8)
    spectrum = torch.randn(BATCH, features, 20, generator=generator)
    candidates: list[dict[str, Any]] = [
        text,
        {"input_ids": ids},
        {"pixel_values": images},
        text | {"pixel_values": images},
        {"input_values": sounds},
        {"input_features": spectrum},
        {"input_features": spectrum.transpose(1, 2)},
        {"input_features": spectrum, "decoder_input_ids": ids[:, :5]},
        {"input_features": spectrum.transpose(1, 2), "decoder_input_ids": ids[:, :5]},
        {"inputs_embeds": hidden, "attention_mask": mask},
        {"inputs_embeds": hidden},
        {"hidden_states": hidden, "attention_mask": mask},
        {"hidden_states": hidden},
        {"pixel_values": images, "decoder_input_ids": ids[:, :5]},
        {"pixel_values": images[:, None].expand(-1, 4, -1, -1, -1)},
    ]
    main = model.main_input_name
    for given in sorted(candidates, key=lambda given: main not in given):
        if set(given) <= names or any(
            p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()
        ):
            yield given


def outputs(model: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    """The floating-point outputs of a model, where tokens are not padding."""
    torch.manual_seed(2)
    with torch.no_grad():
        found = model(**given)
    leaves = torch.utils._pytree.tree_leaves(dict(found) if hasattr(found, "items") else found)
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        raise TypeError("gives no tensors")
    mask = given.get("attention_mask")
    if mask is not None:
        # At padded tokens softmax gives numbers that nobody should use, and ESP zeros.
        tensors = [
            x * mask[..., None] if x.shape[:2] == mask.shape and x.dim() == 3 else x
            for x in tensors
        ]
    return tensors


def runnable(cls: type[Any]) -> tuple[nn.Module, dict[str, Any], list[Tensor]]:
    """A model, inputs that it takes, and its outputs."""
    model = build(cls)
    errors: list[Exception] = []
    for given in inputs_for(model):
        try:
            return model, given, outputs(model, given)
        except Exception as raised:
            errors.append(raised)
    raise errors[0] if errors else TypeError("takes none of the inputs that were tried")


class Watch:
    """Counts calls of mechanisms, and of softmax inside of converted modules."""

    def __init__(self, model: nn.Module, converted: list[str]) -> None:
        self.run: set[str] = set()
        self.called: set[str] = set()
        self.softmax: set[str] = set()
        self.inside: list[str] = []
        for name in converted:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            mechanism = module.mechanism
            assert isinstance(mechanism, Mechanism)
            mechanism.register_forward_pre_hook(lambda *_, name=name: self.called.add(name))

    def _enter(self, name: str) -> None:
        self.run.add(name)
        self.inside.append(name)

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
    if watch.run and not changed > 1e-6:
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
    """How far outputs are from the original's with softmax as a mechanism: all, one per token."""
    espformer.convert(model, Softmax())
    found = outputs(model, given)
    shape = given["attention_mask"].shape if "attention_mask" in given else None
    chosen = [i for i, x in enumerate(before) if x.shape[:2] == shape]
    tokens = difference([found[i] for i in chosen], [before[i] for i in chosen]) if chosen else 0.0
    return difference(found, before), tokens, conversion_report(model)


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


def page(rows: list[Row]) -> str:
    """docs/families.md."""
    count = {v: sum(r.verdict == v for r in rows) for v in {r.verdict for r in rows}}
    lines = [
        "# Families of transformers",
        "",
        f"Made by `python tools/families.py` with transformers {transformers.__version__}: every "
        "bare model class",
        "that it has, built with a tiny configuration, run, converted and run again. *Supported* "
        "means that with",
        "softmax as a mechanism the output stays what it was, that with ESP every module which "
        "the report calls",
        "converted calls ESP and computes no softmax, that the output changes, and that `revert` "
        "gives the original",
        "back. A class that was reported as converted and failed any of this would be *wrong*.",
        "",
        "| verdict | classes |",
        "|---|---|",
    ]
    for verdict in ("supported", "refused", "causal", "no attention", "not tried", "wrong"):
        lines.append(f"| {verdict} | {count.get(verdict, 0)} |")
    for verdict, title in (("wrong", "Wrong"), ("supported", "Supported"), ("refused", "Refused")):
        chosen = [row for row in rows if row.verdict == verdict]
        if chosen:
            lines += ["", f"## {title}", "", "| family | class | |", "|---|---|---|"]
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
            "The script has no tiny configuration or no inputs for these. `convert` treats them by "
            "the same rules, and",
            "`conversion_report` says what it did.",
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
