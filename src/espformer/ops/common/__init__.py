"""Code that all operators share: masks, packing, autograd helpers, custom operators of torch."""

from espformer.ops.common import forks as forks  # it must hear of forks from the import on
