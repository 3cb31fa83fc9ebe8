"""Loaded -> Run: the shared trainer, of one process and of several. It loads nothing and writes no report."""
