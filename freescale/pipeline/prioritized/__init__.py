"""Prioritized embedding communication: rows and gradients travel while the model computes, and nothing changes.

`pipeline` draws it and says when each stage runs, `row_moves` and `urgent_chain` are the stages, `schedule` is what a
training run uses; `adaptive` and `postpone_share` measure by `trials` whether it pays; `order_check` sees who reads
what when.
"""
