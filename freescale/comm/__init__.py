"""How ranks find each other and exchange rows."""
