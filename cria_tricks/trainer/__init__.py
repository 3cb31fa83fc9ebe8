"""Loaded -> Run: the shared trainer and its second loop, for pipelines. It loads nothing and writes no report."""
