"""Compiled loops of the planner."""
