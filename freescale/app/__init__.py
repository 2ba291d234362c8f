"""What you can type: parses and prints only."""
