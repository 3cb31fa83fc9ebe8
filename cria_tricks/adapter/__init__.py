"""An adapter's folder: written, verified, opened, merged, exported, published. It knows no run that made it."""
