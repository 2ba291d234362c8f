"""Histories on disk or made up, and the jagged batches that models see."""
