"""How long things take: compute, links, traffic of ids, plans."""
