"""The rows that one rank holds: a table with its optimizer state, and how a batch reads rows and brings gradients home.

`table` is the specification: an unsharded table, which the sharded one must equal.
"""
