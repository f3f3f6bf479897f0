"""Mechanisms: they map queries, keys and values to the output of an attention layer.

A mechanism is a module with two methods, ``forward(query, key, value)`` and ``matrix(query, key)``.
The rest of the library accepts any mechanism. Users create it without sizes,
``ESP(sort_temperature=0.3)``. A layer calls :meth:`Mechanism.bind` with its sizes, which returns a
copy with parameters, so one object can be passed to many layers, which share nothing.

Parameters that each mechanism adds to a layer with H heads of width D and L slices:

===================================== =====================================================
mechanism                             parameters
===================================== =====================================================
``Softmax()``, ``Sinkhorn()``         0
``Uniform()``                         0
``ESP()``                             0
``ESP(learn_temperature=True)``       H
``ESP(slicer="frozen")``              0 (directions are a buffer of H·L·D numbers)
``ESP(slicer="learnable")``           H·L·D
``Differential(base)``                6·D and those of the base; 3·D when H = 1
===================================== =====================================================
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn

from espformer import functional
from espformer.functional.arguments import check_scale, one_of
from espformer.functional.baselines import SINKHORN_BACKENDS, check_sinkhorn

__all__ = ["Mechanism", "Sinkhorn", "Softmax", "Wrapper"]


class Mechanism(nn.Module):
    """Base class of mechanisms.

    Masks are boolean, ``(batch, tokens)``, True = takes part. In self-attention both are the same
    tensor. Rows of masked queries are zero.

    To write your own, define two methods. Attention layers, models and ``convert`` then accept it.

    Example:
        >>> import torch
        >>> from espformer.nn import Attention, Mechanism
        >>> class Itself(Mechanism):  # every token attends to itself alone; masks are ignored
        ...     def forward(self, query, key, value, *, query_mask=None, key_mask=None):
        ...         return value
        ...
        ...     def matrix(self, query, key, *, query_mask=None, key_mask=None):
        ...         return torch.eye(key.shape[-2]).expand(*query.shape[:-1], -1)
        >>> layer = Attention(32, heads=4, mechanism=Itself())
        >>> layer(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    heads: int | None = None
    head_dim: int | None = None

    has_sort_temperature: bool = False
    """Whether there is a soft sort in it, whose temperature can be annealed and hardened."""

    @property
    def relative_cost(self) -> float:
        """Approximate time of a training step relative to softmax, for short sequences."""
        return 1.0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Output of the attention.

        Args:
            query: ``(batch, heads, N, head_dim)``.
            key: ``(batch, heads, M, head_dim)``.
            value: ``(batch, heads, M, width)``; most layers have width = head_dim.
            query_mask: boolean ``(batch, N)``, True = takes part.
            key_mask: boolean ``(batch, M)``, True = takes part.

        Returns:
            ``(batch, heads, N, width)``.
        """
        raise NotImplementedError

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """The attention matrix, ``(batch, heads, N, M)``, for inspection only."""
        raise NotImplementedError

    def bind(
        self, heads: int, head_dim: int, *, value_dim: int | None = None, depth: int = 0
    ) -> Self:
        """A copy of this mechanism with parameters for a layer of these sizes.

        Random slices and parameters depend on the state of torch's global generator and on `depth`.
        The generator is left as it was, so the other weights of a model do not depend on its
        mechanism. If nothing is drawn between two calls, only the depth tells them apart.

        Args:
            heads: number of heads.
            head_dim: width of a head.
            value_dim: width of a head's values; head_dim by default.
            depth: index of the layer in its model, from 0.

        Example:
            >>> from espformer.nn import ESP
            >>> spec = ESP(learn_temperature=True)
            >>> first, second = spec.bind(6, 64), spec.bind(6, 64)
            >>> first.log_sort_temperature is second.log_sort_temperature
            False
        """
        if heads < 1 or head_dim < 1:
            raise ValueError(
                f"{type(self).__name__}.bind: heads and head_dim must be at least 1, "
                f"got {heads} and {head_dim}"
            )
        bound = copy.deepcopy(self)
        bound.heads, bound.head_dim = heads, head_dim
        bound.build(heads, head_dim, head_dim if value_dim is None else value_dim, depth)
        return bound

    def build(self, heads: int, head_dim: int, value_dim: int, depth: int) -> None:
        """Create the parameters for these sizes; :meth:`bind` calls this on the copy."""

    def extra_parameters(self, heads: int, head_dim: int) -> int:
        """Number of parameters that this mechanism adds to a layer of these sizes.

        Example:
            >>> from espformer.nn import ESP, Softmax
            >>> Softmax().extra_parameters(6, 64), ESP(slicer="learnable").extra_parameters(6, 64)
            (0, 24576)
        """
        with torch.device("meta"):
            bound = self.bind(heads, head_dim)
        return sum(parameter.numel() for parameter in bound.parameters())

    def require_bound(self, query: Tensor) -> None:
        """Raise unless this mechanism was bound to the sizes of `query`."""
        name = type(self).__name__
        if self.heads is None:
            raise RuntimeError(
                f"{name}: it has parameters whose sizes are not known yet; pass it to "
                "espformer.nn.Attention, or call .bind(heads, head_dim) and use the result"
            )
        if query.dim() < 3:
            raise ValueError(
                f"{name}: bound to {self.heads} heads of width {self.head_dim}, so a query is "
                f"(batch, heads, tokens, head_dim) or at least (heads, tokens, head_dim), got "
                f"{tuple(query.shape)} (for one head add it with query.unsqueeze(-3))"
            )
        if query.shape[-3] != self.heads or query.shape[-1] != self.head_dim:
            raise ValueError(
                f"{name}: bound to {self.heads} heads of width {self.head_dim}, got a query of "
                f"shape {tuple(query.shape)}, which has {query.shape[-3]} of {query.shape[-1]}"
            )


@contextlib.contextmanager
def own_draws(depth: int) -> Iterator[int]:
    """Draw what belongs to the mechanism of one layer, and leave the generators as they were.

    The generators get a seed of their own, which is returned, too. Otherwise a mechanism would draw
    the same numbers as the weights after it, and as other layers if nothing is drawn in between.
    """
    device = torch.get_default_device()
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        drawn = torch.randint(2**31 - 1, (depth + 1,), device="cpu")[depth]
        seed = int(drawn) if type(drawn) is Tensor else 0  # fake tensors hold no numbers
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield seed


class Wrapper(Mechanism):
    """Base class of mechanisms that wrap another one, `base`, with the same heads."""

    def __init__(self, base: Mechanism) -> None:
        super().__init__()
        if not isinstance(base, Mechanism):
            raise TypeError(
                f"{type(self).__name__}: base must be a mechanism such as espformer.nn.ESP(), "
                f"got {type(base).__name__}"
            )
        self.base = base
        self.has_sort_temperature = base.has_sort_temperature

    @property
    def relative_cost(self) -> float:
        return self.base.relative_cost

    def build(self, heads: int, head_dim: int, value_dim: int, depth: int) -> None:
        self.base = self.base.bind(heads, head_dim, value_dim=value_dim, depth=depth)


class Softmax(Mechanism):
    r"""Softmax attention, :math:`\mathrm{softmax}(Q K^\top \cdot \text{scale}) V`.

    Args:
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        dropout: probability of dropping an entry of the matrix, in training.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> Softmax()(x, x, x).shape
        torch.Size([2, 4, 5, 8])
    """

    def __init__(self, *, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"Softmax: dropout must be in [0, 1), got {dropout}")
        check_scale("Softmax", scale)
        self.scale = scale
        self.dropout = dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        return functional.softmax_attention(
            query,
            key,
            value,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            query_mask=query_mask,
            key_mask=key_mask,
        )

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """The matrix before dropout."""
        return functional.softmax_plan(
            query, key, scale=self.scale, query_mask=query_mask, key_mask=key_mask
        )

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""


class Sinkhorn(Mechanism):
    r"""Doubly-stochastic attention by Sinkhorn's algorithm, as in Sinkformers.

    .. math:: \mathrm{out} = \mathrm{diag}(u)\, \exp(Q K^\top \cdot \text{scale} / \varepsilon)\,
              \mathrm{diag}(w)\, V,

    where u and w are updated in turns, so that rows sum to one, then columns to N/M.

    Args:
        iterations: number of updates, rows first; 0 and 1 are softmax attention, see
            :func:`espformer.sinkhorn_attention`.
        epsilon: ε, the entropic regularisation, at least 1e-20.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``, see :func:`espformer.sinkhorn_attention`.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> Sinkhorn(iterations=20).matrix(x, x).sum(-2).allclose(torch.ones(2, 4, 5))
        True

    References:
        Sander, Ablin, Blondel, Peyré, Sinkformers: Transformers with doubly stochastic attention,
        AISTATS 2022.
    """

    def __init__(
        self,
        iterations: int = 3,
        epsilon: float = 1.0,
        *,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_sinkhorn("Sinkhorn", iterations, epsilon, scale)
        one_of("Sinkhorn", "backend", backend, SINKHORN_BACKENDS)
        self.iterations = iterations
        self.epsilon = epsilon
        self.scale = scale
        self.backend = backend

    @property
    def relative_cost(self) -> float:
        return 1.0 + 0.2 * self.iterations

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        return functional.sinkhorn_attention(
            query,
            key,
            value,
            iterations=self.iterations,
            epsilon=self.epsilon,
            scale=self.scale,
            query_mask=query_mask,
            key_mask=key_mask,
            backend=self.backend,
        )

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """The attention matrix; after many iterations rows sum to one and columns to N/M."""
        return functional.sinkhorn_plan(
            query,
            key,
            iterations=self.iterations,
            epsilon=self.epsilon,
            scale=self.scale,
            query_mask=query_mask,
            key_mask=key_mask,
        )

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, epsilon={self.epsilon}"
