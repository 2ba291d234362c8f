"""What is told of every step: its numbers, ids and experts, in metrics.jsonl, on the terminal, to trackers."""
