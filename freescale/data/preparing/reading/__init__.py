"""Raw input: which files, which format, which columns, as flat arrays."""
