"""Notebooks in, executed notebooks and one HTML page out: text twins, the runner, stamps, rendering, the report."""

import sys

# nbformat's validator (jsonschema) compiles a grammar of web addresses as it is loaded, which takes seconds and checks
# nothing in a notebook. It does without where this optional package is not there.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
