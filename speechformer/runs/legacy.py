"""Names of before."""

from __future__ import annotations


def upgrade_result(result: dict) -> dict:
    return result
