"""Several processes of one run: which one this is, how they join, watch each other and end. No model, no recipe."""
