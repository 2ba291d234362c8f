"""One file a way to share a batch out over ranks, called as a recipe calls it. What one is: `balance/step_plan.py`."""
