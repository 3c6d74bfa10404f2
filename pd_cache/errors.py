"""The project's exceptions. The root lives in `transfer`, which imports nothing of ours."""

from transfer.errors import PdCacheError


class ConfigError(PdCacheError):
    """A configuration file that cannot be used; the message names file, key path, value and what is allowed."""


class LayoutError(PdCacheError, ValueError):
    """KV tensors of a shape, stride or type that pages cannot be moved in and out of."""


class UnsupportedModelError(PdCacheError, ValueError):
    """A model that an engine cannot serve with a cache; the message names the model and the reason."""


__all__ = ["ConfigError", "LayoutError", "PdCacheError", "UnsupportedModelError"]
