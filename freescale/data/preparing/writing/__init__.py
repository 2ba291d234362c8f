"""The files of a data set: histories, features, items, an index of histories that stay where they are."""
