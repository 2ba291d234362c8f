"""`python -m freescale`: the same as the command, for torchrun."""

from freescale.app.cli import main

main()
