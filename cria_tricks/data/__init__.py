"""Rows -> tokens, with a mask of what is trained -> batches: lists and streams. It loads no model."""
