"""One file a raw format, called as `freescale prepare --format` calls it (`data/preparing/reading/raw_format.py`)."""
