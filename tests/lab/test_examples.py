"""The examples in the docstrings of the laboratory run."""

import doctest
import importlib
import pkgutil

import pytest

import espformer.lab

MODULES = [
    module.name
    for module in pkgutil.walk_packages(espformer.lab.__path__, "espformer.lab.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} needs {error.name}")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0
