"""Run -> Report: what was asked, what ran, what it cost."""
