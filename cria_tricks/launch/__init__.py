"""Other ways to start a run: several processes, or a job on a rented machine."""
