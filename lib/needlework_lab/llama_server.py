"""llama.cpp's own HTTP server, as xllamacpp carries it: `python llama_server.py MODEL HOST PORT CONTEXT_TOKENS SLOTS`.

Run by the engines' interpreter, which has no Needlework; it serves until it is killed.
"""

import signal
import sys

import xllamacpp

model, host, port, context_tokens, slots = sys.argv[1:]
asked = xllamacpp.CommonParams()
asked.model.path, asked.hostnames, asked.port = model, [host], int(port)
asked.n_ctx, asked.n_parallel = int(context_tokens), int(slots)  # the context is divided among the slots
asked.model_alias = {"smollm2-135m-instruct"}
asked.endpoint_metrics = True
# one thread: two that wait for each other starve on a busy machine
asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(asked)
signal.pause()
