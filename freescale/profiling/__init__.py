"""Measures one device for the simulator: `freescale profile`."""
