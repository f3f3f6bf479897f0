"""stub"""

from typing import Any


def write_page(*args: Any) -> None: ...
