"""The project's exceptions. The root lives in `transfer`, which imports nothing of ours."""

from transfer.errors import PdCacheError


class ConfigError(PdCacheError):
    """A configuration file that cannot be used. The message names the file, the key's path, the value and what is allowed."""


class LayoutError(PdCacheError, ValueError):
    """KV tensors whose shape, stride or type does not allow pages to be moved in and out."""


class UnsupportedModelError(PdCacheError, ValueError):
    """A model that an engine cannot serve with a cache; the message names the model and the reason."""


__all__ = ["ConfigError", "LayoutError", "PdCacheError", "UnsupportedModelError"]
