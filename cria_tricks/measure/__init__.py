"""What really happened: bytes, FLOPs, collectives, samples, traces. It changes no run."""
