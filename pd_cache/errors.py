"""The project's exceptions. The root lives in `transfer`, which imports nothing of ours."""

from transfer.errors import PdCacheError as PdCacheError


class ConfigError(PdCacheError):
    """A configuration file that cannot be used. The message names the file, the key's path, the value and
    what is allowed."""


class LayoutError(PdCacheError, ValueError):
    """KV tensors whose pages cannot be moved, because of their shape, strides or type."""


class UnsupportedModelError(PdCacheError, ValueError):
    """A model that an engine cannot serve with a cache; the message names the model and the reason."""


class CacheServerError(PdCacheError):
    """A request to a cache server failed. `reason` is a word that names a counter."""

    reason = "server_lost"


class ServerLostError(CacheServerError):
    """The connection broke, or there was none."""


class NoAnswerError(CacheServerError):
    """No answer came by the deadline."""

    reason = "timeout"


class ServerRefusedError(CacheServerError):
    """The server refused the request. `reason` is that of `protocol.Refused`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
