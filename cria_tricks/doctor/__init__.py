"""This machine and this package: what works here, how fast, what fails in silence, and what each technique is."""
