"""Data of runs: batches for Lightning, which is imported here first, without ranks that are left over."""

from speechformer.process import standard_state

with standard_state():
    import lightning.pytorch as pl

__all__ = ["pl"]
