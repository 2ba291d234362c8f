"""What would N GPUs give me? One measured device, a file of lengths and a cluster description in, a step time out.

Numbers from here are predictions. Plans come from `balance`, bubbles are those of `trace.bubbles`; no torch.
"""
