"""Plan -> Loaded: a model as the plan wants it, and what may be done to it then. It trains nothing."""
