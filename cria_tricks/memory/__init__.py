"""What a run costs in bytes: by dry run of the real modules, before anything is allocated."""
