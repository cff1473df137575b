"""Instruments: one file, one question. Each sends prompts to an endpoint, keeps a journal, and returns a result."""
