"""Needlework: an investigation workbook for LLM deployments that silently forget their context."""

__version__ = "0.1.0"
