"""Error messages for missing optional packages."""

__all__ = ["how_to_install"]


def how_to_install(package: str | None, extra: str) -> str:
    """The end of an error about a missing package, after "needs": its name and how to install it.

    `extra` is the extra of this library that contains the package.

    Example:
        >>> print(how_to_install("numba", "cpu"))
        numba: pip install numba (or, in a checkout of espformer, pip install -e ".[cpu]")
    """
    name = (package or extra).partition(".")[0]
    wanted = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}.get(name, name)
    checkout = f'in a checkout of espformer, pip install -e ".[{extra}]"'
    return f"{name}: pip install {wanted} (or, {checkout})"
