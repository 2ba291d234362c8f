"""What outlives a run: checkpoints, exports, and what is looked at before anything is saved."""
