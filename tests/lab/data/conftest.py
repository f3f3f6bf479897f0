"""Tiny made-up data, a cache of its own for each test, and no way to the hub."""

import os
import shutil
from pathlib import Path

import pytest

from espformer.lab.data.make_tiny import make_tiny

# As it was before the fixture below takes it away; the tests of real data look here.
REAL_DATA = os.environ.get("ESPFORMER_DATA")
REAL_CACHE = os.environ.get("ESPFORMER_CACHE")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path_factory):
    """No data but what a test names, nothing cached, and a hub that cannot be reached."""
    monkeypatch.delenv("ESPFORMER_DATA", raising=False)
    monkeypatch.setenv("ESPFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
    for package in ("pyarrow", "sentencepiece", "PIL"):
        pytest.importorskip(package)
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(**_):
        raise OSError("the hub cannot be reached")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def own_tiny(tiny, tmp_path):
    """Tiny data that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "data"))


@pytest.fixture
def real(monkeypatch):
    """The folder of the real data, with the cache that the caller of the tests chose."""
    if not REAL_DATA:
        pytest.skip("ESPFORMER_DATA does not name a folder with the real data")
    if REAL_CACHE:
        monkeypatch.setenv("ESPFORMER_CACHE", REAL_CACHE)
    return REAL_DATA
