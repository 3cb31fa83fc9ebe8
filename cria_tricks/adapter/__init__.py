"""An adapter's folder: written, verified, opened, merged, published. It knows nothing of the run that made it."""
