"""The answer contract, and what an answer is held against: format, citations, grounding, refusal."""
