"""A run from a program instead of a recipe alone: `freescale.Trainer` and `freescale.Table`.

Objects of the program become kinds that a recipe can name; then the run is the same as any other (`app/run/`).
"""
