"""`python -m freescale`: the same as the command, for torchrun."""

from freescale.cli import main

main()
