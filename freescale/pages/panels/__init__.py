"""What a page says of one run, a file a subject: its header, curves, time, traffic, ids, experts, tables, windows.

A panel takes events or spans of a run and returns a fragment of the page. `pages/report.py` chooses and orders them.
"""
