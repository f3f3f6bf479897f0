r"""Slicers: the directions :math:`\Theta \in \mathbb{R}^{L \times m}` along which ESP sorts.

Calling a slicer without arguments returns its directions, unit rows of shape
``(slices, head_dim)``, shared by all heads, or ``(heads, slices, head_dim)``; None means the axes.

========= ============================== =================================================
slicer    directions                     parameters
========= ============================== =================================================
axis      :math:`\Theta = I`, L = m      none, and no projection to compute
frozen    random, orthogonal, fixed      none
learnable trained                        ``slices * head_dim``, times heads if each has own
========= ============================== =================================================

Queries and keys are linear functions of the tokens, so anything that a slicer with head_dim
directions can learn, the query and key projections can learn too. Learning the directions pays off
for a small number of slices (Shahbazi et al. 2025, "On the choice of slicer").
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AxisSlicer", "FrozenSlicer", "LearnableSlicer", "Slicer", "make_slicer"]


class Slicer(nn.Module):
    """Base class of slicers: a module that returns its directions."""

    def forward(self) -> Tensor | None:
        """Directions, ``(slices, head_dim)`` or ``(heads, slices, head_dim)``; None = the axes."""
        raise NotImplementedError


class AxisSlicer(Slicer):
    """Axis-aligned slices: each coordinate of the head is a slice, nothing is projected.

    Args:
        slices: use only this many axes, the first ones; all by default.
        head_dim: width m of a head, needed with `slices`.

    Example:
        >>> AxisSlicer()() is None
        True
        >>> AxisSlicer(2, head_dim=3)()
        tensor([[1., 0., 0.],
                [0., 1., 0.]])
    """

    directions: Tensor | None

    def __init__(self, slices: int | None = None, head_dim: int | None = None) -> None:
        super().__init__()
        first = None
        if slices is not None and slices != head_dim:
            if head_dim is None or not 1 <= slices <= head_dim:
                raise ValueError(
                    f"AxisSlicer: a head of width {head_dim} has {head_dim} axes, got "
                    f'slices={slices} (for more directions use "frozen" or "learnable")'
                )
            first = torch.eye(head_dim)[:slices]
        self.register_buffer("directions", first, persistent=False)

    def reset_parameters(self) -> None:
        """Set the directions, for instance after building on the meta device."""
        if self.directions is not None:
            nn.init.eye_(self.directions)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        """As torch does; directions, which no state dict has, are set as in a new slicer."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        assigns = local_metadata.get("assign_to_params_buffers", False)
        if self.directions is not None and self.directions.is_meta and assigns:
            self.directions = torch.empty_like(self.directions, device="cpu")
        self.reset_parameters()

    def forward(self) -> Tensor | None:
        return self.directions


class FrozenSlicer(Slicer):
    """Directions drawn once and never trained: orthogonal in blocks of the head's width.

    Each direction is uniform on the sphere. Orthogonal directions capture different components of
    the tokens, whereas independent ones would overlap.

    The directions are a buffer, so they are saved with the model. They depend only on the seed, not
    on the state of the global random number generator.

    Args:
        slices: number of directions L.
        head_dim: width m of a head.
        heads: give each head its own directions; None shares them.
        seed: seed of the draw.

    Example:
        >>> directions = FrozenSlicer(16, head_dim=8, heads=4)()
        >>> directions.shape
        torch.Size([4, 16, 8])
        >>> directions.norm(dim=-1).allclose(torch.ones(4, 16))
        True
    """

    directions: Tensor

    def __init__(self, slices: int, head_dim: int, heads: int | None = None, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        shape = _shape("FrozenSlicer", slices, head_dim, heads)
        self.register_buffer("directions", torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions for this seed, for instance after building on the meta device."""
        # Drawn on the CPU in float64, so that every device gets the same numbers.
        generator = torch.Generator("cpu").manual_seed(self.seed)
        *heads, slices, width = self.directions.shape
        blocks = torch.randn(
            *heads, -(-slices // width), width, width,
            generator=generator, device="cpu", dtype=torch.float64,
        )  # fmt: skip
        # Multiplied by the signs of R's diagonal, the columns of Q are uniform on the sphere.
        q, r = torch.linalg.qr(blocks)
        rows = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.flatten(-3, -2)
        self.directions.copy_(rows[..., :slices, :])

    def forward(self) -> Tensor:
        return self.directions

    def extra_repr(self) -> str:
        return f"{_describe(self.directions)}, seed={self.seed}"


class LearnableSlicer(Slicer):
    """Directions that are trained.

    The parameter is unconstrained. The directions are its rows divided by their norms, so they have
    unit norm whatever the optimiser, weight decay or weight averaging do to the parameter.

    Args:
        slices: number of directions L.
        head_dim: width m of a head.
        heads: give each head its own directions; None shares them.

    Example:
        >>> slicer = LearnableSlicer(4, head_dim=8)
        >>> _ = slicer.directions.data.mul_(3.0)
        >>> slicer().norm(dim=-1).allclose(torch.ones(4))
        True
    """

    def __init__(self, slices: int, head_dim: int, heads: int | None = None) -> None:
        super().__init__()
        self.directions = nn.Parameter(
            torch.empty(_shape("LearnableSlicer", slices, head_dim, heads))
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions again, uniformly on the sphere."""
        with torch.no_grad():
            self.directions.normal_()
            self.directions.copy_(F.normalize(self.directions, dim=-1))

    def forward(self) -> Tensor:
        # In 16 bits the norm itself would be off by one per cent.
        directions = self.directions
        wide = torch.promote_types(directions.dtype, torch.float32)
        return F.normalize(directions.to(wide), dim=-1).to(directions.dtype)

    def extra_repr(self) -> str:
        return _describe(self.directions)


def make_slicer(
    kind: Literal["axis", "frozen", "learnable"] | str,
    head_dim: int,
    *,
    slices: int | None = None,
    heads: int | None = None,
    seed: int = 0,
) -> Slicer:
    """A slicer from its name.

    Args:
        kind: "axis", "frozen" or "learnable".
        head_dim: width m of a head.
        slices: number of directions L; head_dim by default, and at most that for axes.
        heads: give each head its own directions; None shares them.
        seed: seed of frozen directions.

    Example:
        >>> make_slicer("learnable", 8, slices=3)
        LearnableSlicer(slices=3, head_dim=8)
    """
    if kind == "axis":
        return AxisSlicer(slices, head_dim)
    number = head_dim if slices is None else slices
    if kind == "frozen":
        return FrozenSlicer(number, head_dim, heads, seed)
    if kind == "learnable":
        return LearnableSlicer(number, head_dim, heads)
    raise ValueError(f'make_slicer: expected "axis", "frozen" or "learnable", got {kind!r}')


def _shape(name: str, slices: int, head_dim: int, heads: int | None) -> tuple[int, ...]:
    for argument, size in (("slices", slices), ("head_dim", head_dim), ("heads", heads)):
        if size is not None and size < 1:
            raise ValueError(f"{name}: {argument} must be at least 1, got {size}")
    return (slices, head_dim) if heads is None else (heads, slices, head_dim)


def _describe(directions: Tensor) -> str:
    names = ("heads", "slices", "head_dim")[-directions.ndim :]
    return ", ".join(f"{name}={size}" for name, size in zip(names, directions.shape, strict=True))
