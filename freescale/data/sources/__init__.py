"""One file a kind of data set; its name is what a recipe calls it. How one is made: `data/source_kinds.py`."""
