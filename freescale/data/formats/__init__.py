"""One file a raw format, called as `freescale prepare --format` calls it; see `data/preparing/raw_format.py`."""
