"""What lies on a disk for a run: its folder and its checkpoints. It knows nothing of rows, and loads no model."""
