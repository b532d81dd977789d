"""Layers shared by the architectures: each has a plain torch path and a bound kernel path."""
