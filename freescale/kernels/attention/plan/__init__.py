"""What is to do: tiles, pairs of tiles, bias tables, as lists of work for the GPU."""
