"""The commands of `freescale`, a file a subject: what each takes, and what it prints. `app/cli.py` gathers them.

A command parses its options and calls what stands behind a door; torch is imported by those that need it.
"""
