"""The kernels of soft sorting as short sums of exponentials: tables, and how they are fitted.

SoftSort compares sorted numbers through ``k(x)`` with ``x = |s_n - s_j| / width``:

- ``metric="absolute"``: ``k(x) = exp(-x)`` and ``width = t``;
- ``metric="squared"``: ``k(x) = exp(-x²)`` and ``width = sqrt(t)``.

Both are written here as ``k(x) = Re Σ_r weight_r · exp(-pole_r · x)`` for ``x ≥ 0``. An exponential
is multiplicative, ``exp(-p(x + y)) = exp(-p x) exp(-p y)``, so a few states can carry the
contribution of all ranks to the left of a point along the sorted numbers. This makes the operator
linear in the number of tokens (see :mod:`espformer.ops.esp.sorted_kernel`). The absolute metric has
one real pole with weight one, and is exact. The Gaussian needs a few complex poles; each pair of
conjugate poles is stored once, with its weight doubled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Contributions below this fraction of a unit weight change no result, not even in float64. If they
# were kept, they would decay to subnormal numbers, which a CPU multiplies a hundred times more
# slowly: at t = 1e-3 they would take most of the time.
NEGLIGIBLE = 1e-18


def decay(x: Tensor) -> Tensor:
    """``exp(-x)`` for ``x ≥ 0``, and zero where that is negligible."""
    return torch.exp(-x).masked_fill(x > -math.log(NEGLIGIBLE), 0)


@dataclass(frozen=True)
class ExponentialSum:
    """``k(x) ≈ Re Σ_r weights[r] · exp(-poles[r] · x)`` for ``x ≥ 0``, within ``error``."""

    metric: str
    weights: tuple[complex, ...]
    poles: tuple[complex, ...]
    error: float

    def exact(self, x: Tensor) -> Tensor:
        """The kernel itself, ``k(x)``, for ``x ≥ 0``."""
        return decay(x) if self.metric == "absolute" else decay(x * x)

    def approximate(self, x: Tensor) -> Tensor:
        """The sum of exponentials, in float64, which is used between chunks."""
        poles = torch.tensor(self.poles, dtype=torch.complex128)
        weights = torch.tensor(self.weights, dtype=torch.complex128)
        return (weights * torch.exp(-poles * x.double().unsqueeze(-1))).sum(-1).real


def fit_gaussian(pairs: int, *, reach: float = 7.0, samples: int = 401) -> ExponentialSum:
    """Fits ``exp(-x²) ≈ Re Σ w exp(-p x)`` with ``pairs`` pairs of conjugate poles.

    A sum of r exponentials sampled on a uniform grid has a Hankel matrix of rank r whose column
    space is invariant under a shift by one sample, and the shift acts on it with eigenvalues
    ``exp(-p · step)``. The singular values of the Gaussian's Hankel matrix fall by two orders of
    magnitude per pair, so its leading left singular vectors give the poles (the matrix-pencil or
    ESPRIT method), and least squares gives the weights. The weights are constrained to ``k(0) = 1``
    and ``k'(0) = 0``, so that equal numbers do not repel each other. The largest error on a fine
    grid is stored in the table: 1.5e-5, 1.9e-7, 2.8e-11 for 3, 4, 6 pairs (for the slope 2.0e-4,
    3.8e-6, 1.0e-9).

    Reference: Beylkin & Monzón, *On approximation of functions by exponential sums*, 2005.
    """
    grid = torch.linspace(0, reach, samples, dtype=torch.float64)
    values = torch.exp(-(grid**2))
    hankel = values.unfold(0, (samples + 1) // 2, 1)
    space = torch.linalg.svd(hankel).U[:, : 2 * pairs]
    shift = torch.linalg.lstsq(space[:-1], space[1:], driver="gelsd").solution
    poles = -torch.log(torch.linalg.eigvals(shift)) / grid[1]
    poles = poles[poles.imag > 0]
    poles = poles[poles.imag.argsort()]
    waves = torch.exp(-poles * grid.unsqueeze(-1))
    # Re(w · wave) is linear in (Re w, Im w) with the columns (Re wave, -Im wave), so
    # Re Σ w = 1 and Re Σ w p = 0 are two linear equations: one solution, plus their null space.
    columns = torch.cat([waves.real, -waves.imag], -1)
    held = torch.stack([columns[0], torch.cat([poles.real, -poles.imag])])
    right, free = torch.linalg.pinv(held)[:, 0], torch.linalg.svd(held).Vh[2:].mT
    rest = (values - columns @ right).unsqueeze(-1)
    change = torch.linalg.lstsq(columns @ free, rest, rcond=1e-15, driver="gelsd").solution[:, 0]
    weights = torch.complex(*(right + free @ change).chunk(2))
    table = ExponentialSum("squared", tuple(weights.tolist()), tuple(poles.tolist()), error=0.0)
    return replace(table, error=uniform_error(table))


def uniform_error(table: ExponentialSum) -> float:
    """The largest ``|k(x) - Re Σ w exp(-p x)|`` on a fine grid of ``0 ≤ x ≤ 40``."""
    x = torch.cat([torch.linspace(0, 8, 16001), torch.linspace(8, 40, 4001)]).double()
    return float((table.exact(x) - table.approximate(x)).abs().max())


ABSOLUTE = ExponentialSum("absolute", weights=(1.0,), poles=(1.0,), error=0.0)

# Computed by fit_gaussian(pairs); a test repeats the fit and checks the errors.
GAUSSIAN = {
    3: ExponentialSum(
        "squared",
        weights=(
            complex(3.0681379668095055, 6.887507171364337),
            complex(-2.214105260888583, -0.7914979780654036),
            complex(0.14596729407907777, -0.04968793229727875),
        ),
        poles=(
            complex(3.050392499516284, 0.7461659106619203),
            complex(3.006883431946035, 2.289946194303433),
            complex(2.9057525591206783, 4.047699603073095),
        ),
        error=1.48e-05,
    ),
    4: ExponentialSum(
        "squared",
        weights=(
            complex(5.938605317607006, 13.714691253236124),
            complex(-5.7611245462229, -2.182772720852916),
            complex(0.8398643860344432, -0.3286798094671748),
            complex(-0.017345157418548307, 0.02286550739512444),
        ),
        poles=(
            complex(3.5290705697661826, 0.6527312523028613),
            complex(3.501183455750997, 1.9835207544080935),
            complex(3.4409535780901552, 3.4042832164591847),
            complex(3.3337420795859347, 5.055647416689824),
        ),
        error=1.85e-07,
    ),
    6: ExponentialSum(
        "squared",
        weights=(
            complex(23.513509645899504, 55.781422252535556),
            complex(-30.7301812547672, -12.354610279954402),
            complex(8.823331190065234, -3.525888645278304),
            complex(-0.5995318023008056, 1.1412480781673404),
            complex(-0.007437350394822045, -0.06573729012560722),
            complex(0.00030957149809884843, 0.0006485568001950992),
        ),
        poles=(
            complex(4.322780828318228, 0.5390355307888077),
            complex(4.307934396566775, 1.626471065347793),
            complex(4.277230180703615, 2.7441157830761753),
            complex(4.2282427106129585, 3.9207560793859777),
            complex(4.155779762798766, 5.206842982651927),
            complex(4.046271010941148, 6.728248357351023),
        ),
        error=2.75e-11,
    ),
}


def exponential_sum(metric: str, dtype: torch.dtype) -> ExponentialSum:
    """The table for a metric, with as many terms as the precision of ``dtype`` can use."""
    if metric == "absolute":
        return ABSOLUTE
    return GAUSSIAN[6 if dtype == torch.float64 else 4]
