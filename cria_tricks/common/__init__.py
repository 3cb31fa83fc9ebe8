"""What every part may use: errors, files, units, words on a terminal, names. It knows nothing of models."""
