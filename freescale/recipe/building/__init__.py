"""What is built from several sections of a recipe; what one section builds stands in its own file."""
