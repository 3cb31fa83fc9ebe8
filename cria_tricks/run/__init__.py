"""Recipe -> Report and adapter: the whole way, and the functions of the package."""
