"""``python -m espformer.lab.cli`` is the command ``espformer``."""

from espformer.lab.cli import main

main()
