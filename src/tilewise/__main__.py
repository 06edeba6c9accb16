"""``python -m tilewise`` is the command ``tilewise``."""

from tilewise.train.cli import main

main()
