"""The claims that ship: one file each, called what `freescale prove --only` calls it (`freescale.registry`)."""
