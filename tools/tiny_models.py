"""The model classes of the installed transformers, each as a tiny model with inputs it takes."""

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from espformer.ops.common.operators import tree_leaves

LARGEST = 40_000_000  # parameters of a configuration that is small enough to be run
BATCH, TOKENS = 2, 12

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
    # Without a size of its own a model may halve an image five times: some tokens must be left.
    size = getattr(vision, "image_size", None) or 96
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
    leaves = tree_leaves(dict(found) if hasattr(found, "items") else found)
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
