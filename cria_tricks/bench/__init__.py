"""Benchmarks: one case, its results, tables and figures."""
