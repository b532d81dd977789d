"""The compiled module and its stateless wrappers; see `loader` and `ops`."""
