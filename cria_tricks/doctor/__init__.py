"""A look at this machine and this package: what works here, and what the libraries do in silence."""
