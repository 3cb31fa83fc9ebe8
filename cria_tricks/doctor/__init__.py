"""A look at this machine and this package: what works here, how fast, and what each technique is."""
