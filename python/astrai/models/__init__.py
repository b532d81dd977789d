"""Model architectures: small files over shared layers, found by name through the registry."""

from astrai.models.registry import Architecture, get_model_class, register, supported

__all__ = ["Architecture", "get_model_class", "register", "supported"]
