"""The kinds of transports that ship: one file each, called what a recipe calls it (`freescale.registry`)."""
