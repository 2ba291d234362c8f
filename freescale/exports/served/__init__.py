"""Features and tables as an export has them: written from those of a run, read again, looked up for a request."""
