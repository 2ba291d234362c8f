"""All faults, a file for each family. A new one is a function with `@fault()` in one of them."""

from tests.chaos.fault import FAULTS, Fault
from tests.chaos.faults import checkpoints, data, disks, inside, network, readers, signals, starts

FAMILIES = (signals, starts, inside, readers, checkpoints, data, disks, network)
__all__ = ["FAMILIES", "FAULTS", "Fault"]
