"""Command line of astrai: `astrai generate`, `chat`, `bench` and `models`.

Modules here import torch and the engine only inside the commands that need them, so that
`astrai --help` answers at once.
"""
