"""Loaded -> Run: one loop, for one process and for several. It loads nothing and writes no report."""
