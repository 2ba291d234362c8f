"""One file a raw format, called as `freescale prepare --format` calls it. What a format is: `data/raw_format.py`."""
