"""Benchmarks: one case, a card in one sitting, their results and tables."""
