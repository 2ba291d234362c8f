"""What is told of every step: its numbers, its time, ids and experts, in the log and on the terminal."""
