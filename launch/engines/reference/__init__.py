"""The reference engine: a small engine with a paged KV cache, for trying out, testing and measuring pd-cache.

It serves a Hugging Face causal LM from a local folder, or one with random weights, on the CPU. It is neither fast nor made for
production; it is made to be right. A prompt gives the same tokens whether its prefix was computed here or loaded from the pool, and
requests are answered whatever the cache does.

A request's path: `server` reads it (`protocol`) and submits it to the `engine`, whose thread runs the `scheduler`. The scheduler reserves
`blocks`, has the `cache` load the prefix on `workers`, computes the rest with the `model` through the pages (`attention`), has the chunks
stored, and draws tokens (`sampling`) into the `generation` that the server reads from.
"""

from launch.engines.reference.engine import CacheFactory, ReferenceEngine
from launch.engines.reference.engine_errors import (
    EngineClosedError,
    GenerationError,
    QueueFullError,
)
from launch.engines.reference.generation import Generation
from launch.engines.reference.model import PagedModel, load_model
from launch.engines.reference.request import GenerationRequest, GenerationStats, TokenEvent
from launch.engines.reference.sampling import SamplingParams
from launch.engines.reference.serve import run_engine, serve
from launch.engines.reference.server import make_app

__all__ = [
    "CacheFactory",
    "EngineClosedError",
    "Generation",
    "GenerationError",
    "GenerationRequest",
    "GenerationStats",
    "PagedModel",
    "QueueFullError",
    "ReferenceEngine",
    "SamplingParams",
    "TokenEvent",
    "load_model",
    "make_app",
    "run_engine",
    "serve",
]
