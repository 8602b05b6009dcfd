"""From `result.json` files to tables, pictures and one page: `python -m speechformer.report FOLDER`. No torch.

load        result.json files -> studies, each with a DataFrame that has a row for each run
labels      variants of a study named by the settings in which they differ
statistics  means, intervals, contrasts, Holm's correction
tables      the tables of a study, and cautions by rule
figures     the figures of a study
page        report.md, report.html, CSV and LaTeX
"""
