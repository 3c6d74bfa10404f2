"""pd-cache: a shared KV cache over Mooncake for disaggregated prefill/decode LLM serving.

Importing this package loads neither torch nor Mooncake.
"""

__version__ = "0.1.0"
