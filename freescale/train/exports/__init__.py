"""What a trained model becomes for those who ask: an export, chains of versions, and models that answer from them.

`ExportedModel` recommends and scores; it needs nothing of the run that made it. `chain` keeps a base and its deltas.
"""
