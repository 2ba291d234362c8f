"""Long histories compressed into learnt tokens: trained in one masked pass, served from caches of those tokens."""
