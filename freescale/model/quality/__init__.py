"""Metrics as sums that ranks can add up: of ranked lists, of predictions, and of the tasks of a head."""
