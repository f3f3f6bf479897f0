"""Command lines of the benchmarks: what `--help` shows, and devices that must be there."""

from __future__ import annotations

import argparse

import torch


class _Help(argparse.RawDescriptionHelpFormatter):
    """The description as it is written, and defaults, except those that mean "nothing"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.help or default is None or default is False or default == argparse.SUPPRESS:
            return action.help
        words = map(str, default if isinstance(default, (list, tuple)) else [default])
        return f"{action.help} (default: {' '.join(words)})"


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m benchmarks.NAME``."""
    prog = f"python -m benchmarks.{name}"
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=_Help)


def find_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """The device; one that torch cannot use here ends the program, before anything is measured."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none")
    return device
