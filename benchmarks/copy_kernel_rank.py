"""`freescale` whose `comm.transport=collective` is a copy kernel: copy_kernel_rank.py BLOCKS train ..."""

from __future__ import annotations

import sys

from copy_kernel import take_the_place_of_collective

from freescale.cli import main

if __name__ == "__main__":
    take_the_place_of_collective(int(sys.argv.pop(1)))
    main()
