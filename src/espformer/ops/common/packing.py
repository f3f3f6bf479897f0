"""Packed sequences, concatenated without padding, for attentions that take padded batches.

Sequences of similar length form a group. Each group is padded to its longest sequence and passed
to the attention as a batch with a mask. The groups are chosen from the lengths such that the cost
of padding and of calls is lowest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Packing", "attend_nested", "cumulative", "group_lengths", "refuse_masks"]

# The fixed cost of a call, in tokens.
CALL_TOKENS = {"cuda": 2048, "cpu": 32}

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class _Side:
    """The queries, or the keys, of a group of sequences: their packed and padded positions."""

    tokens: Tensor | None  # indices among all packed tokens; None for all of them, in order
    slots: Tensor  # their indices in the padded batch
    count: int  # number of sequences
    length: int  # length of the longest sequence
    mask: Tensor | None  # (count, length); None if all have that length

    def pad(self, x: Tensor) -> Tensor:
        """(all tokens, heads, width) to (count, heads, length, width)."""
        x = x if self.tokens is None else x.index_select(0, self.tokens)
        room = x.new_zeros(self.count * self.length, *x.shape[1:])
        padded = room.index_copy(0, self.slots, x)
        return padded.unflatten(0, (self.count, self.length)).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """(count, heads, length, width) to (tokens of the group, heads, width)."""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)


@dataclass(frozen=True)
class _Group:
    queries: _Side
    keys: _Side
    masks: dict[str, Tensor | None]


class Packing:
    """The boundaries of packed sequences, and how they are grouped and padded.

    Args:
        cu_seqlens_q: cumulative sequence lengths of the queries, integers ``(sequences + 1,)``,
            starting with 0. A tensor on a GPU causes a synchronisation.
        cu_seqlens_k: the same for the keys; `cu_seqlens_q` by default.
        device: device of the tokens.
        name: the calling function, for error messages.

    Example:
        >>> import torch
        >>> from espformer.functional import softmax_attention
        >>> packing = Packing(torch.tensor([0, 3, 3, 5]), device="cpu")
        >>> x = torch.randn(5, 2, 8)  # three sequences of 3, 0 and 2 tokens, two heads
        >>> packing.attend(softmax_attention, x, x, x).shape
        torch.Size([5, 2, 8])
    """

    def __init__(
        self,
        cu_seqlens_q: Tensor | Sequence[int],
        cu_seqlens_k: Tensor | Sequence[int] | None = None,
        *,
        device: torch.device | str,
        name: str = "Packing",
    ) -> None:
        self.name = name
        self.query_lengths = _lengths(name, "cu_seqlens_q", cu_seqlens_q)
        self.key_lengths = self.query_lengths
        if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
            self.key_lengths = _lengths(name, "cu_seqlens_k", cu_seqlens_k)
        if len(self.key_lengths) != len(self.query_lengths):
            raise ValueError(
                f"{name}: cu_seqlens_q has {len(self.query_lengths)} sequences, cu_seqlens_k has "
                f"{len(self.key_lengths)}; they must have equally many (lengths may be 0)"
            )
        device = torch.device(device)
        found = _groups(self.query_lengths, self.key_lengths, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _of_graphs[self.query_lengths, self.key_lengths, device] = found
        self._groups, self._order = found

    @staticmethod
    def of_mask(mask: Tensor) -> Packing:
        """The packing of the unmasked tokens of a padded batch; `mask` is ``(batch, tokens)``."""
        lengths = mask.sum(-1).tolist()
        return Packing(cumulative(lengths), device=mask.device)

    def attend(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of every sequence: (tokens of queries, heads, width).

        Args:
            attention: takes ``(batch, heads, tokens, width)`` and masks, ``query_mask`` and
                ``key_mask``.
            query: ``(tokens of queries, heads, m)``.
            key: ``(tokens of keys, heads, m)``.
            value: ``(tokens of keys, heads, d)``.
        """
        self._check(query, key, value)
        parts = []
        for group in self._groups:
            padded = attention(
                group.queries.pad(query), group.keys.pad(key), group.keys.pad(value), **group.masks
            )
            parts.append(group.queries.unpad(padded))
        found = sum(len(part) for part in parts)
        if found < len(query) or not parts:  # queries without a key, or no tokens at all
            zeros = value.new_zeros(len(query) - found, query.shape[1], value.shape[-1])
            if not parts:  # sums of nothing give zeros a gradient, so that a training step can run
                zeros = zeros + query[:0].sum() + key[:0].sum() + value[:0].sum()
            parts.append(zeros)
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self._order is None else out.index_select(0, self._order)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for label, x in {"query": query, "key": key, "value": value}.items():
            if x.dim() != 3:
                raise ValueError(
                    f"{self.name}: packed {label} must have shape (tokens, heads, width), got "
                    f"{tuple(x.shape)}"
                )
            which, lengths = "cu_seqlens_k", self.key_lengths
            if label == "query":
                which, lengths = "cu_seqlens_q", self.query_lengths
            if len(x) != sum(lengths):
                raise ValueError(
                    f"{self.name}: {label} has {len(x)} tokens, but {which} ends with "
                    f"{sum(lengths)}; it must end with the number of tokens"
                )
            if x.shape[1] != query.shape[1]:
                raise ValueError(
                    f"{self.name}: query has {query.shape[1]} heads but {label} has {x.shape[1]}"
                )


def _lengths(name: str, label: str, cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The lengths of the sequences; raises if `cu_seqlens` is not valid."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"{name}: {label} must hold integers, of shape (sequences + 1,), got "
                f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            )
        cu_seqlens = cu_seqlens.tolist()
    if not cu_seqlens or cu_seqlens[0] != 0 or any(b < a for a, b in pairwise(cu_seqlens)):
        raise ValueError(
            f"{name}: {label} must begin with 0 and never decrease: the number of tokens before "
            f"each sequence, and of all; got {list(cu_seqlens)[:8]}"
        )
    return tuple(b - a for a, b in pairwise(cu_seqlens))


def cumulative(lengths: Sequence[int]) -> list[int]:
    """Cumulative sequence lengths, starting with 0."""
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return total


def group_lengths(sizes: Sequence[int], call: int) -> list[list[int]]:
    """Divides sequences into groups such that padded tokens and calls cost as little as possible.

    Args:
        sizes: lengths of the sequences.
        call: the fixed cost of a group, in tokens.

    Returns:
        For every group, the indices of its sequences in ascending order.

    Example:
        >>> group_lengths([10, 100, 9, 98], call=16)
        [[0, 2], [1, 3]]
        >>> group_lengths([10, 100, 9, 98], call=1000)
        [[0, 1, 2, 3]]
    """

    # Sizes are rounded up to eight steps per power of two, few enough to try all groupings.
    def step(size: int) -> int:
        unit = max(1, (1 << size.bit_length()) // 16)
        return -(-size // unit) * unit

    steps = sorted({step(size) for size in sizes})
    members = [[i for i, size in enumerate(sizes) if step(size) == s] for s in steps]
    # best[j]: the lowest cost of the first j steps, and the first step of their last group.
    best: list[tuple[int, int]] = [(0, 0)]
    for j in range(1, len(steps) + 1):
        counts, options = 0, []
        for i in range(j - 1, -1, -1):
            counts += len(members[i])
            options.append((best[i][0] + counts * steps[j - 1] + call, i))
        best.append(min(options))
    groups, j = [], len(steps)
    while j > 0:
        i = best[j][1]
        groups.append(sorted(index for part in members[i:j] for index in part))
        j = i
    return groups[::-1]


# What captured CUDA graphs read at every replay, and must not lose when the cache below forgets it.
_of_graphs: dict[tuple[Any, ...], tuple[list[_Group], Tensor | None]] = {}


@functools.lru_cache(maxsize=32)  # all layers of a model have the same lengths
def _groups(
    query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], device: torch.device
) -> tuple[list[_Group], Tensor | None]:
    """Groups of the sequences that have queries and keys, and the order that undoes grouping."""
    with torch.inference_mode(False):  # cached tensors must also work in a later training step
        return _make_groups(query_lengths, key_lengths, device)


def _make_groups(
    query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], device: torch.device
) -> tuple[list[_Group], Tensor | None]:
    used = [i for i, (n, m) in enumerate(zip(query_lengths, key_lengths, strict=True)) if n and m]
    sizes = [query_lengths[i] + key_lengths[i] for i in used]
    call = 2 * CALL_TOKENS.get(device.type, CALL_TOKENS["cpu"])
    parts = [[used[i] for i in group] for group in group_lengths(sizes, call)]
    groups = []
    for part in parts:
        queries = _side(query_lengths, part, device)
        same = all(query_lengths[i] == key_lengths[i] for i in part)
        keys = _side(key_lengths, part, device)
        if same:
            keys = _Side(keys.tokens, queries.slots, queries.count, queries.length, queries.mask)
        masks = {"query_mask": queries.mask, "key_mask": keys.mask}
        if not same and masks["query_mask"] is None:
            # Without a query mask, the key mask would also mask the same number of queries.
            ones = torch.ones(queries.count, queries.length, dtype=torch.bool, device=device)
            masks["query_mask"] = ones
        groups.append(_Group(queries, keys, masks))
    listed = set(used)
    rest = [i for i, n in enumerate(query_lengths) if n and i not in listed]
    sequences = [i for part in parts for i in part] + rest
    if sequences == sorted(sequences):
        return groups, None
    tokens = _token_indices(query_lengths, sequences)
    order = torch.empty_like(tokens)
    order[tokens] = torch.arange(len(tokens))
    return groups, order.to(device)


def _token_indices(lengths: Sequence[int], sequences: Sequence[int]) -> Tensor:
    """Indices of all tokens of some sequences."""
    starts = cumulative(lengths)
    ranges = [torch.arange(starts[i], starts[i + 1]) for i in sequences]
    return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.long)


def _side(lengths: Sequence[int], sequences: Sequence[int], device: torch.device) -> _Side:
    longest = max(lengths[i] for i in sequences)
    counts = torch.tensor([lengths[i] for i in sequences])
    mask = torch.arange(longest) < counts.unsqueeze(-1)
    slots = mask.flatten().nonzero().squeeze(-1)
    everyone = len(slots) == sum(lengths)
    tokens = None if everyone else _token_indices(lengths, sequences).to(device)
    full = len(slots) == mask.numel()
    count = len(sequences)
    return _Side(tokens, slots.to(device), count, longest, None if full else mask.to(device))


def refuse_masks(name: str, *masks: Tensor | None) -> None:
    """Raises if a mask is given: nested tensors have no padding."""
    if any(mask is not None for mask in masks):
        raise ValueError(
            f"{name}: nested tensors hold no padding; leave out tokens instead of masking them"
        )


def attend_nested(name: str, attention: Attention, query: Any, key: Any, value: Any) -> Tensor:
    """Attention of jagged nested tensors, (batch, heads, tokens, width); the output is one too."""
    packed = []
    for label, x in {"query": query, "key": key, "value": value}.items():
        jagged = x.is_nested and x.layout == torch.jagged and x.dim() == 4
        if not jagged or x._ragged_idx != 2 or x.lengths() is not None:
            got = f"nested, with layout {x.layout}, of {x.dim()} dimensions"
            if not x.is_nested:  # strided nested tensors have no shape
                got = f"not nested, {tuple(x.shape)}"
            raise ValueError(
                f"{name}: query, key and value must all be jagged nested tensors of shape (batch, "
                "heads, tokens, width), tokens ragged: "
                "torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) of "
                f"(all tokens, heads, width); {label} is {got}"
            )
        packed.append(x.transpose(1, 2))
    if key.offsets() is not value.offsets() and not torch.equal(key.offsets(), value.offsets()):
        raise ValueError(f"{name}: key and value must have the same lengths")
    offsets = query.offsets()
    packing = Packing(offsets, key.offsets(), device=query.device, name=name)
    out = packing.attend(attention, *(x.values() for x in packed))
    return torch.nested.nested_tensor_from_jagged(out, offsets).transpose(1, 2)
