"""From `result.json` files to tables, pictures and one page: `python -m speechformer.report FOLDER`. No torch."""
