"""From YAML, overrides and options to checked values: all errors at once, each with its key."""
