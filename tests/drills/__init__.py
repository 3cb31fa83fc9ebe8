"""Rehearsals of what may happen to a run, as scripts; the test suite runs a few rounds of each."""
