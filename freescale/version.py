"""The version, for those who may not import everything else to know it."""

__version__ = "0.1.0"
