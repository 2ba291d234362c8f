"""What a pass lets its tokens see: training batches, requests with candidates, candidates before kept histories.

`view` has the protocol. Encoders ask a view for positions and attention, and never know which pass it is.
"""
