"""From raw files to a data set: reading, sorting, joining side files, writing."""
