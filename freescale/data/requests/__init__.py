"""Requests with candidates, for heads that rank: from histories, impressions, anchors, logs; their tasks and labels."""
