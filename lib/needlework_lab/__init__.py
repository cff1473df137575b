"""A deployment in a box: real processes, real HTTP, real KV pages, and faults planted by name.

import needlework_lab

with needlework_lab.start(mode="pd", faults=("F14",), geometry="v4") as deployment:
    ...  # deployment.base_url, .prefill_url, .decode_url, .digests(prompt=…), .dump_pages(folder, prompt=…)
"""

from needlework_lab.deployment import Deployment, LabError
from needlework_lab.starting import start
from needlework_lab.types import GEOMETRIES

__all__ = ["GEOMETRIES", "Deployment", "LabError", "start"]
