"""What is asked of a model: values of a request, read and checked, and the recommendations or scores that answer it."""
