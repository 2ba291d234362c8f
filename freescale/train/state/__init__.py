"""What a run leaves to go on from: checkpoints, their shards, who resumes where, what is looked at before a save."""
