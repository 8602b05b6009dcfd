"""The paper: what was measured with the laboratory, as claims, tables and pages. See `render.py`."""
