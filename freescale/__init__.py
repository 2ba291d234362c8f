"""FreeScale: sequence recommendation models on many GPUs with almost no wasted GPU time."""

__version__ = "0.1.0"
