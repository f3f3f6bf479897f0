"""Differentiable sorting, ranking and selection in O(N log N) time and O(N) memory.

A soft sort is one half of ESP attention: attention between numbers and their ranks. So it uses the
operator of :mod:`espformer.functional`, with the same backends on CPU and GPU, and the same
gradients, metrics and balancing. See ``docs/soft-sorting.md``.
"""

from espformer.sorting.permuting import soft_permutation, soft_sort, soft_unsort
from espformer.sorting.ranking import soft_rank, spearman, spearman_loss
from espformer.sorting.selecting import soft_median, soft_quantile, soft_topk
from espformer.sorting.slicing import SlicedPlan, sliced_plan, sliced_wasserstein

__all__ = [
    "SlicedPlan",
    "sliced_plan",
    "sliced_wasserstein",
    "soft_median",
    "soft_permutation",
    "soft_quantile",
    "soft_rank",
    "soft_sort",
    "soft_topk",
    "soft_unsort",
    "spearman",
    "spearman_loss",
]
