"""Kinds of the family "id_map": one file each, called as in a recipe. `embedding/id_map.py` has the protocols."""
