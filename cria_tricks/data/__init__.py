"""Chat rows -> token rows with a mask of what is trained -> batches."""
