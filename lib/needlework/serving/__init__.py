"""How to talk to a deployment: the endpoint client, what it can do, and running requests from synchronous code."""

from .endpoint import Endpoint
from .loop import run
from .replies import Reply, TransportError

__all__ = ["Endpoint", "Reply", "TransportError", "run"]
