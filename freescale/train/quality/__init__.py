"""How good a model is: full ranking, metrics, the best state so far."""
