"""The reference engine: continuous batching of a Hugging Face model over ``KVCache``; needs the extra ``hf``.

Read it in this order: ``requests`` (what is asked), ``scheduler`` (which rows compute which tokens), ``step`` (what crosses
to a worker), ``worker`` (tables, memory, model), ``models`` (how transformers is made to read through a table), ``engine``
(the loop), ``executors`` (a thread, or processes).
"""

from blocktable.engine.engine import Engine
from blocktable.engine.executors import WorkerDied
from blocktable.engine.requests import Completion, Event, Request

__all__ = ["Completion", "Engine", "Event", "Request", "WorkerDied"]
