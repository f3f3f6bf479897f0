"""Tiny models of every family that can be converted, and inputs for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

TOKENS = 7
MASK = torch.arange(TOKENS) < torch.tensor([7, 4, 5])[:, None]


class TimmAttention(nn.Module):
    """Holds what timm's ``Attention`` holds, for machines without timm."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, scale=self.scale
        )
        return self.proj_drop(self.proj(self.norm(y.transpose(1, 2).reshape(batch, tokens, dim))))


class TimmBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = TimmAttention(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x))


def torch_encoder(**options: object) -> nn.Module:
    settings = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True} | options
    layer = nn.TransformerEncoderLayer(16, 2, **settings)
    nested = bool(settings["batch_first"]) and not settings.get("norm_first", False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def timm_blocks() -> nn.Module:
    return nn.Sequential(TimmBlock(16, 2), TimmBlock(16, 2))


def timm_vit() -> nn.Module:
    vit = pytest.importorskip("timm.models.vision_transformer", reason="timm is not installed")
    return vit.VisionTransformer(16, 4, embed_dim=16, depth=2, num_heads=2, num_classes=3)


def hugging_face(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    image = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 4,
        "hidden_dropout_prob": 0.0,
    }
    translation = {
        "vocab_size": 50,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 40,
        "dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    distil = {
        "vocab_size": 50,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 32,
        "max_position_embeddings": 40,
        "dropout": 0.0,
    }
    settings = {"Bert": text, "Roberta": text, "DistilBert": distil, "ViT": image, "DeiT": image}
    settings |= {"Bart": translation, "Marian": translation}
    config = getattr(transformers, f"{family}Config")(**settings[family])
    return getattr(transformers, f"{family}Model")(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "torch": torch_encoder,
    "torch-seq-first": lambda: torch_encoder(batch_first=False),
    "torch-norm-first": lambda: torch_encoder(norm_first=True),
    "timm-like": timm_blocks,
    "timm": timm_vit,
    "bert": lambda: hugging_face("Bert"),
    "roberta": lambda: hugging_face("Roberta"),
    "distilbert": lambda: hugging_face("DistilBert"),
    "vit": lambda: hugging_face("ViT"),
    "deit": lambda: hugging_face("DeiT"),
    "bart": lambda: hugging_face("Bart"),
    "marian": lambda: hugging_face("Marian"),
}
HUGGING_FACE = ("bert", "roberta", "distilbert", "vit", "deit", "bart", "marian")
WITH_PADDING = tuple(f for f in FAMILIES if not f.startswith("timm") and f not in ("vit", "deit"))


def make(family: str) -> nn.Module:
    torch.manual_seed(1)
    model = FAMILIES[family]().eval()
    # Off the tiny weights that models start with: attention shall matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def run(family: str, model: nn.Module, mask: Tensor | None = None, rows: slice = slice(None)):
    """Output ``(batch, tokens, width)`` for fixed inputs, the same in every call."""
    generator = torch.Generator().manual_seed(2)
    length = TOKENS if mask is None else mask.shape[1]
    if family in ("vit", "deit", "timm"):
        images = torch.randn(3, 3, 16, 16, generator=generator)[rows]
        return model(images) if family == "timm" else model(images)[0]
    if family == "timm-like" or family.startswith("torch"):
        x = torch.randn(3, TOKENS, 16, generator=generator)[rows, :length]
        if family == "timm-like":
            return model(x)
        padding = None if mask is None else ~mask
        if family == "torch-seq-first":
            return model(x.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)
        return model(x, src_key_padding_mask=padding)
    ids = torch.randint(3, 50, (3, TOKENS), generator=generator)[rows, :length]
    options = {"attention_mask": torch.ones_like(ids) if mask is None else mask.long()}
    if family in ("bart", "marian"):
        target = torch.tensor([[2, 5, 9, 11, 4], [2, 8, 3, 7, 6], [2, 12, 9, 30, 21]])[rows]
        options["decoder_input_ids"] = target
    return model(ids, **options)[0]
