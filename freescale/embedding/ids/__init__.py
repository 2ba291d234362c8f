"""Ids that need more than arithmetic to become rows: zero-collision maps, admission, eviction, numbering.

What an id map is stands in `embedding/id_map.py`; the kinds that a recipe names are files of `embedding/id_maps/`.
"""
