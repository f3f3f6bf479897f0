"""Whether a program is being exported, as opposed to compiled."""

import torch

__all__ = ["is_exporting"]


def is_exporting() -> bool:
    """True inside ``torch.export`` and its users, False inside ``torch.compile``.

    :func:`torch.compiler.is_exporting` itself is True in both while torch 2.11 compiles.
    """
    return bool(torch.compiler._is_exporting_flag)
