"""How to talk to a deployment: the endpoint client, what it can do, and running requests from synchronous code."""

from .endpoint import Endpoint
from .replies import Reply, TransportError
from .sync import run

__all__ = ["Endpoint", "Reply", "TransportError", "run"]
