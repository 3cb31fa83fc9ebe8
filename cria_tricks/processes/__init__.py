"""Several processes of one run: which one this is, how they join, agree and end. No model, no recipe."""
