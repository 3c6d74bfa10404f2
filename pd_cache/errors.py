"""The project's exceptions. The root lives in `transfer`, which imports nothing of ours."""

from transfer.errors import PdCacheError


class ConfigError(PdCacheError):
    """A configuration file that cannot be used; the message names file, key path, value and what is allowed."""


class LayoutError(PdCacheError, ValueError):
    """KV tensors of a shape, stride or type that pages cannot be moved in and out of."""


__all__ = ["ConfigError", "LayoutError", "PdCacheError"]
