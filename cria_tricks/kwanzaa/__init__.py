"""The answer contract, the four scores, and the evaluation of answers."""
