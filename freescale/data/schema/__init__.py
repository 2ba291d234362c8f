"""The schema of a data set: which features there are, who owns each, and what it is. Plain objects, no torch."""
