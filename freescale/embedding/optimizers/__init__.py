"""Kinds of the family "optimizer": one file each, called as in a recipe. `embedding/optimizer.py` has the protocol."""
