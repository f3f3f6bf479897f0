"""The report of a conversion: one row per attention module."""

from dataclasses import dataclass

from torch import nn

__all__ = ["ConversionReport", "ConversionRow", "conversion_report"]

ATTRIBUTE = "_espformer_report"


@dataclass(frozen=True)
class ConversionRow:
    """One attention module.

    Attributes:
        module: its name in the model; empty for the model itself.
        kind: its class.
        heads: number of heads, if known.
        action: "converted" or "left".
        reason: the mechanism, or why the module was not converted.
    """

    module: str
    kind: str
    heads: int | None
    action: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """All attention modules of a model in the model's order; ``print`` shows them as a table.

    Attributes:
        rows: one for each attention module.
    """

    rows: tuple[ConversionRow, ...]

    @property
    def converted(self) -> list[str]:
        """Names of the modules that were converted."""
        return [row.module for row in self.rows if row.action == "converted"]

    @property
    def left(self) -> list[str]:
        """Names of the modules that were not converted."""
        return [row.module for row in self.rows if row.action == "left"]

    def __str__(self) -> str:
        if not self.rows:
            return "no attention modules"
        table = [("module", "kind", "heads", "action", "reason")]
        for row in self.rows:
            heads = "?" if row.heads is None else str(row.heads)
            table.append((row.module or "(the model)", row.kind, heads, row.action, row.reason))
        widths = [max(len(line[column]) for line in table) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[4]])
            for line in table
        )


def conversion_report(model: nn.Module) -> ConversionReport:
    """The report of :func:`espformer.convert` on this model.

    Example:
        >>> from torch import nn
        >>> from espformer.integrations import conversion_report, convert
        >>> from espformer.nn import ESP
        >>> model = convert(nn.TransformerEncoderLayer(8, 2), ESP())
        >>> print(conversion_report(model))
        module     kind                heads  action     reason
        self_attn  MultiheadAttention  2      converted  ESP
    """
    report = getattr(model, ATTRIBUTE, None)
    if not isinstance(report, ConversionReport):
        raise ValueError(
            f"conversion_report: this {type(model).__name__} was not converted (a report belongs "
            "to the model that was given to espformer.convert, not to its parts)"
        )
    return report
