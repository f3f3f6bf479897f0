from collections.abc import Iterator

import pytest

from espformer.ops.common import triton as launch


@pytest.fixture(autouse=True)
def _fresh_shapes() -> Iterator[None]:
    """Tests change the sizes of blocks and chunks, which are worked out once for every shape."""
    launch.forget()
    yield
    launch.forget()
