"""Other ways to do the same training job, to measure ours against."""
