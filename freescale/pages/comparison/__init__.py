"""Runs side by side: which can be compared, how they differ, and how sure that is.

Begin with `compare`, which writes the page and the lines of the terminal; the others decide what may be said there.
"""
