"""What every part may use: errors, files, units, words on a terminal, signals. It knows nothing of models."""
