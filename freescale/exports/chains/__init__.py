"""A base and its deltas: versions of an export in a folder that is only added to, and how one becomes the next."""
