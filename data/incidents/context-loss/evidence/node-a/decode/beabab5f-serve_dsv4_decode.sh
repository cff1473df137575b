#!/bin/bash
export NEEDLEWORK_ROLE=decode
exec /opt/needlework/.venv/bin/python -m needlework.lab.role --geometry v4 --page-size 256 --chunked-prefill-size 2048 --index-topk 512 --role decode
