"""Loaded before the tests."""

import needlework.workbook  # noqa: F401  before anything that imports nbformat: it spares seconds
