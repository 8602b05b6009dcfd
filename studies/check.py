"""Render the pages a second time, by other code, and compare: `make check`, or `python -m studies.check`.

It shares no code with the package and the other scripts here, only data: templates, archives, names in words and what
is said in `claims.yaml` and `published.yaml`. The functions of a template are written again, with pandas and scipy,
and do not round. A page is right if its words are the same, and if each number is the recomputed one, rounded.

Not recomputed: bench/README.md and play/README.md; times and sizes of states of mechanisms; what `maps.py` measures;
the translators of which translation/tables/runs.csv is all that is left.
"""

import argparse
import functools
import itertools
import json
import math
import re
import sys
import tarfile
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import jinja2
import numpy as np
import pandas as pd
import yaml
from scipy import optimize, stats

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "outputs" / "reference"
FILES = ["studies/claims.yaml", "studies/published.yaml", "speechformer/report/labels.yaml"]
CLAIMS, PUBLISHED, LABELS = (yaml.safe_load((ROOT / name).read_text("utf-8")) for name in FILES)
SPEECHES = ("classify", "lm", "maps", "classify_beyond", "lm_beyond")  # families of claims on the reports' corpus
VERDICTS = ("supported", "equivalent", "inconclusive", "contradicted")
OURS, NONE = "this repository", "–"
ANY, SIZE = "¤", "¿"  # whatever name or number the page has here
PARTS = {"test_accuracy": "01", "test_accuracy_in_train": "1", "test_accuracy_not_in_train": "0"}  # of predictions
PAGES = {"README": "README.md", "findings": "outputs/reference/README.md"} | {
    name: f"outputs/reference/{name}/README.md"
    for name in ("contexts", "ladder", "ladder_classify", "ladder_translate", "translation", "probes", "mechanisms")
}
NUMBER = re.compile(r"([+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+−]\d+)?)")


# Runs and values


def read(archive):
    """Yield the results of an archive, with the answers of classifiers."""
    with tarfile.open(archive) as tar:
        wanted = (member for member in tar if member.name.endswith(("result.json", "predictions.tsv", "maps.json")))
        files = {member.name: tar.extractfile(member).read().decode() for member in wanted}
    maps = json.loads(next((text for name, text in files.items() if name.endswith("maps.json")), "{}"))
    for name, text in files.items():
        if name.endswith("result.json"):
            run = json.loads(text) | {"archive": archive.parent.name}
            run["answers"] = files.get(name.replace("result.json", "predictions.tsv"))
            run["metrics"] = run.get("metrics", {}) | maps.get(Path(name).parent.name, {})
            yield run


@functools.cache
def finished():
    """Return a row for each finished run and baseline, with dotted columns."""
    archives = sorted(REFERENCE.glob("**/runs.tar.xz"))
    runs = pd.json_normalize([run for archive in archives for run in read(archive)])
    derived = {
        "metrics.validation_balanced_accuracy": runs.filter(like="metrics.validation_accuracy_of_").mean(axis=1),
        "metrics.training_seconds": runs["seconds_by_phase.training"],
        "metrics.peak_megabytes": runs["machine.peak_bytes"] / 1e6,
        "metrics.parameters": runs["parameters.total"],
    }
    return runs.assign(**derived)[runs["status"] == "finished"]


def where(settings):
    """Return the runs with these values; a setting that older runs lack counts as equal."""
    same = np.full(len(finished()), True)
    for key, value in settings.items():
        own = finished().get(key, pd.Series(index=finished().index))[same]
        is_later = key == "config.model.attention" and value == "luong"
        same[same] = [one == value or ((is_later or value is None) and pd.isna(one) is True) for one in own]
    return finished()[same]


@functools.cache
def all_runs(name, protocol=None):
    """Return the runs of a variant; without a protocol, those under `paper` if there are any."""
    if name in (named := {rung.name: rung.runs for study in CLAIMS["ladders"] for rung in rungs(study)}):
        return named[name]
    entry = {**PUBLISHED["rows"].get(name, {}), **CLAIMS["variants"].get(name, {})}
    own = {"model.init_std": None, **entry["where"]}
    settings = {f"config.{key}": value for key, value in own.items() if key not in PUBLISHED["free"]}
    corpus = entry.get("corpus", "speeches")
    runs = where({"config.study": entry["study"] or None, "corpus.name": corpus, "baseline.name": None, **settings})
    known = [own for own in ("paper", "clean") if own in {*runs["config.protocol.name"]}]
    runs = runs[runs["config.protocol.name"] == (protocol or known[0])]
    assert runs["seed"].is_unique, f"{name} has two runs of one seed"
    return runs


def has_collapsed(runs):
    """Return whether each run failed to learn."""
    rule = CLAIMS["collapsed"]
    return runs.reindex(columns=[f"metrics.{rule['metric']}"]).lt(rule["below"]).any(axis=1)


def variant(name, protocol=None, baseline=None):
    """Return the runs of a variant that learned, or a baseline beside it: of the same data."""
    runs = all_runs(name, protocol)
    return runs[~has_collapsed(runs)] if baseline is None else beside(runs, baseline)


def beside(runs, baseline):
    """Return a baseline of the same data as some runs."""
    of_data = ("sha256", "counts.validation", "counts.extra_lines")
    keys = ["archive", "task", *(f"corpus.{key}" for key in of_data), "config.protocol.name", "config.protocol.fold"]
    known = {key: runs.iloc[0].get(key) for key in keys}
    return where({"baseline.name": baseline, **{key: None if pd.isna(own) else own for key, own in known.items()}})


def values(runs, metric, at=None):
    """Return a metric, or the ratio of two, by seed: at the end, or at an epoch or step."""
    if " / " in metric:
        over, under = (values(runs, part, at) for part in metric.split(" / "))
        return over / under
    own = runs.get(f"metrics.{metric}", pd.Series(math.nan, runs.index))
    if at:
        epochs = runs["config.trainer.max_epochs"]
        steps = at * (runs["steps"] / epochs).where(epochs > 0, 1)
        points = ({point["step"]: point for point in curve} for curve in runs["curve"])
        own = pd.Series([point.get(round(step), {}).get(metric) for point, step in zip(points, steps)])
    return own.set_axis(runs["seed"]).astype(float).dropna()


def mixed(runs, metric):
    """Return a metric by seed; of a model that is mixed with counts, that of the mixture."""
    of_mixture = values(runs, re.sub("^(test|validation)_", r"\1_mixture_", metric))
    return values(runs, metric) if of_mixture.empty else of_mixture


def best(runs, metric):
    """Return the best value of a metric during each run; of a mean over texts, the mean of the bests."""
    extreme = max if "accuracy" in metric else min
    texts = [f"test_perplexity_{text}" for text in ("obama", "wbush", "hbush")]
    names = texts if metric == "test_perplexity_mean" else [metric]
    bests = [
        [extreme((point[name] for point in curve if name in point), default=math.nan) for name in names]
        for curve in runs["curve"]
    ]
    return pd.Series(np.mean(bests, axis=1), runs["seed"]).dropna()


# Numbers as text


def scale(metric):
    """Return by what a page multiplies a metric: fractions are shown in per cent."""
    return 100 if re.search("accuracy|exact|rate", metric) and " / " not in metric else 1


def number(value, signed=False):
    """Return a number with all its digits."""
    if value is None or math.isnan(value):
        return NONE
    return f"{value:{'+' if signed and value else ''}.10g}".replace("-", "−")


def interval(low, high, signed=False):
    """Return an interval."""
    return NONE if math.isnan(low) else f"[{number(low, signed)}, {number(high, signed)}]"


def mean_and_sd(metric, own):
    """Return the mean of values with their standard deviation."""
    own = scale(metric) * own
    return number(own.mean()) + (f" ± {number(own.std())}" if len(own) > 1 else "")


def estimate(effect):
    """Return an effect with its 95 % confidence interval."""
    return f"{number(effect.mean, True)} {interval(*effect.interval, True)}"


def p_text(p):
    """Return a p-value."""
    return NONE if math.isnan(p) else number(p) if p >= 0.001 else "< 0.001"


def markdown(rows):
    """Return a table."""
    header, *body = rows
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, [":--", *["--:"] * (len(header) - 1)], *body])


# Statistics


def prediction(metric, own):
    """Return the 95 % interval of one more run."""
    ends = stats.t.interval(0.95, len(own) - 1, own.mean(), own.std() * math.sqrt(1 + 1 / len(own)))
    most = 100 / scale(metric) if re.search("accuracy|bleu|chrf", metric) else math.inf
    return " to ".join(number(scale(metric) * min(max(end, 0), most)) for end in ends)


def effect_of(by, n, mean, error, freedom, test):
    """Return an estimate with its interval and p-value, in units of the page."""
    t = stats.t(freedom, mean, error)
    p = math.nan if math.isnan(error) else 2 * min(t.cdf(0), t.sf(0))
    ends = [by * end for end in t.interval(0.95)]
    own = {"mean": by * mean, "error": by * error, "freedom": freedom, "interval": ends, "p": p}
    return SimpleNamespace(**own, n=n, test=test)


def varies(own):
    """Return whether values differ by more than rounding in single precision."""
    return np.ptp(own) > 1e-6 * max(1, abs(own).max())


def contrast(by, terms, constant=0.0):
    """Return the sum of times x mean of values by seed, paired over common seeds if there are two."""
    table = pd.DataFrame({k: times * own for k, (times, own) in enumerate(terms)})
    both = table.dropna().sum(axis=1) + constant
    if len(both) > 1 or len(terms) == 1:
        error = both.sem() if len(both) > 1 and varies(both) else math.nan
        test = "paired" if len(terms) > 1 else "one sample"
        return effect_of(by, [len(both)], both.mean(), error, len(both) - 1, test)
    n = [*table.count()]
    squares = {k: own.sem() ** 2 for k, own in table.items() if n[k] > 1 and varies(own.dropna())}
    total, enough = sum(squares.values()), min(n) > 1
    freedom = total**2 / sum(square**2 / (n[k] - 1) for k, square in squares.items()) if total else math.nan
    error = math.sqrt(total) if total and enough else math.nan
    return effect_of(by, n, table.mean().sum() + constant, error, freedom, "Welch")


def answers(runs, metric="test_accuracy"):
    """Return whether each run is right on each test sentence that a metric counts, [runs, sentences]."""
    table = np.array([[line.split("\t") for line in text.splitlines()[1:]] for text in runs["answers"]])
    chosen = table[:, [part in PARTS[metric] for part in table[0, :, 2]]]
    return chosen[..., 0] == chosen[..., 1]


def over_sentences(terms, constant=0.0):
    """Return a contrast of accuracies over seeds and sentences, crossed random effects (Searle et al. 1992)."""
    tables = [times * answers(runs, metric) for times, runs, metric in terms]
    of_items = sum(own.mean(axis=0) for own in tables)
    parts, twice = [(of_items.var(ddof=1) / len(of_items), len(of_items) - 1)], 0.0
    for own in (own for own in tables if len(own) > 1):
        of_seeds = own.mean(axis=1, keepdims=True)
        parts.append((of_seeds.var(ddof=1) / len(own), len(own) - 1))
        rest = own - of_seeds - own.mean(axis=0) + own.mean()
        twice += (rest**2).mean() / (len(own) - 1) / (own.shape[1] - 1)
    total = sum(square for square, _ in parts)
    freedom = total**2 / sum(square**2 / own for square, own in parts)
    n = [len(runs) for _, runs, _ in terms if runs["baseline.name"].isna().all()]
    mean = constant + sum(own.mean() for own in tables)
    return effect_of(100, n, mean, math.sqrt(max(total - twice, parts[0][0])), freedom, "over sentences")


def detectable(effect):
    """Return the smallest effect that such a test finds with a power of 80 %."""
    critical = stats.t.ppf(0.975, effect.freedom)
    return effect.error * optimize.brentq(lambda d: stats.nct.sf(critical, effect.freedom, d) - 0.8, 0, 200)


def holm(p_values):
    """Correct p-values for their number."""
    order = [k for k in np.argsort(p_values) if p_values[k] == p_values[k]]
    steps = itertools.accumulate(((len(order) - k) * p_values[i] for k, i in enumerate(order)), max)
    return pd.Series([*steps], order, dtype=float).clip(upper=1).reindex(range(len(p_values))).tolist()


# Published values


@functools.cache
def printed():
    """Return each published value, and whether it is inside our 95 % interval of one run."""
    lines = []
    for table in PUBLISHED["tables"]:
        for cells in table["rows"]:
            own = dict(zip(table["columns"], cells))
            at = own.pop("epoch", 0) or own.pop("step", 0)
            about = {"row": table["row"], "chosen": table["chosen"], "at": at, "curve": len(table["rows"]) > 1}
            about["final"] = cells is table["rows"][-1]
            for metric, value in own.items():
                unit = table.get("unit", 100) if "accuracy" in metric else 1
                lines.append({**about, "metric": metric, "value": value / unit})
    lines = pd.DataFrame(lines)
    lines["inside"] = [inside(line, variant(line.row, "paper")) for line in lines.itertuples()]
    return lines


def inside(line, runs, noisy=None):
    """Return whether the mean of runs is as near to a published value as that of one more run; NaN without one.

    Args:
        noisy: runs whose standard deviation counts.
    """
    at = None if line.final else line.at
    own, noise = (
        best(part, line.metric) if line.chosen == "best" else values(part, line.metric, at)
        for part in (runs, runs if noisy is None else noisy)
    )
    reach = stats.t.ppf(0.975, len(noise) - 1) * noise.std() * math.sqrt(1 + 1 / max(len(own), 1))
    return float(abs(own.mean() - line.value) <= reach) if len(own) and len(noise) > 1 else math.nan


def published_value(row, metric, at, chosen):
    """Return a published value, the ratio of two or the mean over the texts; NaN if no table has it."""
    if " / " in metric:
        over, under = (published_value(row, part, at, chosen) for part in metric.split(" / "))
        return over / under
    lines = printed()[(printed()["row"] == row) & (printed()["chosen"] == chosen)]
    lines = lines[lines["at"] == at] if at else lines[lines["final"] & (lines["curve"] | (lines["at"] == 0))]
    found = lines.set_index("metric")["value"]
    texts = found.filter(like="test_perplexity_").mean() if metric == "test_perplexity_mean" else math.nan
    return found.get(metric, texts)


@functools.cache
def curves():
    """Return the rows with a published curve, and the points of each that we can compare."""
    return {row: own for row, own in printed()[printed()["curve"]].dropna().groupby("row", sort=False)}


def not_reproduced():
    """Return the rows of which fewer than half of the published curve is inside."""
    return [row for row, points in curves().items() if points["inside"].mean() < 0.5]


# Claims


def measure(name, entry):
    """Return a claim with its numbers, before correction; None without runs."""
    line, terms, constant, sums, prints = {"protocol": "paper", "at": None}, [], 0.0, {}, Counter()
    for own in entry["effect"]:
        line |= {"times": 1, "baseline": None} | own
        if "constant" in own:
            constant += own["constant"]
            continue
        times, metric, at, baseline = (line[key] for key in ("times", "metric", "at", "baseline"))
        for chosen in ("last", "best"):
            is_printed = line["protocol"] == "paper" and not baseline
            value = published_value(line["variant"], metric, at, chosen) if is_printed else math.nan
            prints[chosen] += times * value
        runs = variant(line["variant"], line["protocol"], baseline)
        if not baseline:
            key = tuple(runs.index)
            sums[key] = sums.get(key, 0) + times * values(runs, metric, at)
        terms.append((times, runs, metric, at))
    if any(values(*rest).empty for _, *rest in terms):
        return None
    metric = next(own[2] for own in terms if own[1]["baseline.name"].isna().all())
    known = [(times, runs, re.sub(r"\btest_perp", "test_known_perp", of), at) for times, runs, of, at in terms]
    is_over = "over" in entry and all(
        of in PARTS and not at and runs["answers"].notna().all() for _, runs, of, at in terms
    )
    less = [values(*rest).mean() * times for times, *rest in terms if times < 0]
    reference = abs(min(constant, 0) + sum(less))
    points, share = next((own for word, own in CLAIMS["margins"].items() if word in metric), (math.nan, 0))
    by = scale(metric)
    effect = over_sentences([own[:3] for own in terms], constant) if is_over else of_terms(terms, constant)
    margin = by * (points + share * reference)
    found = [by * (own + constant) for own in prints.values() if own == own]
    has_known = "test_perp" in metric and "length" not in metric
    freedom = sum(len(own) - 1 for own in sums.values())
    sign = 1 if entry["expect"] == "more" else -1
    lowest = by * min(values(*rest).mean() for _, *rest in terms)
    return SimpleNamespace(
        name=name, metric=metric, says=entry["says"], by=entry["by"], family=entry["family"], entry=entry,
        estimated=effect, effect=estimate(effect), sign=sign, lowest=lowest,
        is_small=bool(stats.t.sf((margin - abs(effect.mean)) / effect.error, effect.freedom) < 0.05),
        is_at_ceiling="accuracy" in metric and lowest > 100 - margin,
        published=found[0] if found else math.nan,
        regime=entry["by"] != OURS and any(own.get("variant") in not_reproduced() for own in entry["effect"]),
        noise=by * stats.t.ppf(0.975, freedom) * math.sqrt(sum(own.var() for own in sums.values())),
        known=estimate(of_terms(known, constant)) if has_known else "",
        relative=f"{number(100 * effect.mean / reference, True)} %" if reference and "accuracy" not in metric else "",
    )  # fmt: skip


def of_terms(terms, constant):
    """Return a contrast of terms (times, runs, metric, at); baselines are exact."""
    by, exact = scale(terms[0][2]), [runs["baseline.name"].notna().any() for _, runs, *_ in terms]
    own = [(times, values(*rest)) for times, *rest in terms]
    constant += sum(times * found.iloc[0] for (times, found), is_exact in zip(own, exact) if is_exact)
    return contrast(by, [term for term, is_exact in zip(own, exact) if not is_exact], constant)


@functools.cache
def family_of(family):
    """Return the claims of a family, corrected together."""
    if family == "mechanisms":
        measured = [measure_mechanism(name, entry) for name, entry in CLAIMS["mechanisms"].items()]
    else:
        measured = [measure(name, entry) for name, entry in CLAIMS["claims"].items() if entry["family"] == family]
    own = [claim for claim in measured if claim]
    for claim, p in zip(own, holm([claim.estimated.p for claim in own])):
        is_right = claim.estimated.mean * claim.sign > 0
        open_ = "equivalent" if claim.is_small and not claim.is_at_ceiling else "inconclusive"
        claim.p, claim.verdict = p, ("supported" if is_right else "contradicted") if p < 0.05 else open_
    return own


def drawn():
    """Return the worst verdict of each conclusion on the speeches, and whether its regime is not reproduced."""
    parts = {}
    for claim in (claim for family in SPEECHES for claim in family_of(family)):
        if claim.by != OURS and "reformulates" not in claim.entry:
            parts.setdefault(claim.entry.get("conclusion", claim.name), []).append(claim)
    return {
        own[0].name: (max((claim.verdict for claim in own), key=VERDICTS.index), all(claim.regime for claim in own))
        for own in parts.values()
    }


# What a template can ask for


WORDS: dict = {}


def word(function):
    """Let templates call a function."""
    return WORDS.setdefault(function.__name__, function)


@word
def claim(name):
    """Return a claim."""
    family = CLAIMS["claims"].get(name, {"family": "mechanisms"})["family"]
    return next(own for own in family_of(family) if own.name == name)


@word
def published(own):
    """Return the published effect of a claim."""
    return number(own.published, True)


def verdict(own):
    """Return the verdict on a claim, or on the conclusion that it opens, with what limits it."""
    text, is_missing = drawn().get(own.name, (own.verdict, own.regime))
    limits = {
        "by a part": text != own.verdict,
        "but small": own.is_small and own.p < 0.05,
        f"at the ceiling ({number(own.lowest)} % or more)": own.is_at_ceiling,
        "exploratory": own.by == OURS,
        "*published with the opposite sign*": own.published * own.sign < 0,
        "*regime not reproduced*": is_missing,
    }
    text = text if text == "inconclusive" else f"**{text}**"
    return ", ".join([text, *(words for words, holds in limits.items() if holds)])


@word
def claims(family):
    """Return the tables of a family of claims."""
    first = [["claim", "verdict", "published", "noise", "ours [95 % confidence interval]", "seeds"]]
    parts, tests = [*first], [["claim", "relative", "in-vocabulary tokens", "minimum detectable", "test", "p, Holm"]]
    for own in family_of(family):
        effect, by = own.estimated, "" if own.by == OURS else f" ({own.by})"
        noise = NONE if math.isnan(own.published) else number(own.noise)
        seeds = " and ".join(map(str, dict.fromkeys(effect.n)))
        cells = [own.says + by, verdict(own), published(own), noise, own.effect, seeds]
        (parts if "conclusion" in own.entry and own.name not in drawn() else first).append(cells)
        tests.append([own.says, own.relative, own.known, number(detectable(effect)), effect.test, p_text(own.p)])
    tables = [table(first), folded("Parts of conclusions", parts), folded("The tests", tests)]
    return "\n\n".join(filter(None, tables))


def table(rows):
    """Return a table without the columns that are empty; nothing of a header alone."""
    return rows[1:] and markdown([*zip(*(column for column in zip(*rows) if {*column[1:]} - {"", NONE}))])


def folded(title, rows):
    """Return a table that a reader opens, unless it is empty."""
    return f"<details><summary>{title}</summary>\n\n{table(rows)}\n\n</details>" if rows[1:] else ""


@word
def value(name, metric=None, at=None, *, protocol=None, baseline=None, less=None, show="mean ± sd"):
    """Return a value of a variant."""
    runs = variant(name, protocol, baseline)
    if show == "seeds":
        return str(len(runs))
    metric = metric or main_metric(all_runs(name, protocol))
    if metric.startswith("counts."):
        over, *under = (runs.iloc[0][f"corpus.counts.{part}"] for part in metric.removeprefix("counts.").split(" / "))
        return f"{over / (under or [1])[0]:,.0f}"
    own = best(runs, metric) if show.startswith("best") else values(runs, metric, at)
    if less:
        return estimate(contrast(scale(metric), [(1, own), (-1, values(variant(less, protocol), metric, at))]))
    if show.endswith("prediction"):
        return prediction(metric, own)
    return mean_and_sd(metric, own) if show == "mean ± sd" else number(scale(metric) * own.mean())


def main_metric(runs):
    """Return the metric that a study compares."""
    return runs["report.metric"].dropna().iloc[0]


def reported():
    """Return our runs of the rows with published values, under the protocol of the reports."""
    rows = {row: all_runs(row, "paper") for row in printed()["row"].unique()}
    protocol = PUBLISHED["corpus"]["protocol"]
    return {
        row: own
        for row, own in rows.items()
        if all((own[f"config.protocol.{k}"] == v).all() for k, v in protocol.items())
    }


@word
def agreement():
    """Return how far published results agree with ours, and how much single runs vary."""
    found, lost = {}, []
    for metric in ("test_accuracy", "test_accuracy_not_in_train", "test_perplexity_mean"):
        known = [values(runs, metric) for runs in reported().values() if not has_collapsed(runs).any()]
        own = [part for part in known if len(part) > 1]
        freedom = sum(len(part) - 1 for part in own)
        pooled = sum((len(part) - 1) * part.var() for part in own) / freedom
        found[f"noise_{metric}"] = number(scale(metric) * stats.t.ppf(0.975, freedom) * math.sqrt(2 * pooled))
    for row, runs in reported().items():
        collapsed = has_collapsed(runs)
        if collapsed.any():
            metric = main_metric(runs)
            own, rest = values(runs[collapsed], metric), values(runs[~collapsed], metric)
            ends = f"{number(scale(metric) * own.min())} to {number(scale(metric) * own.max())}"
            others = mean_and_sd(metric, rest)
            lost.append(
                f"{len(own)} of {len(runs)} runs of `{row}`, which end at {ends} % on test (others: {others})"
            )
    lines, ends = printed().dropna(subset="inside"), finals()
    chosen = ends[ends["row"].isin([row for entry in CLAIMS["chosen"] for row in entry["rows"]])]
    all_claims = [own for family in CLAIMS["families"] for own in family_of(family) if own.published == own.published]
    readable = pd.Series([float(abs(own.published) > own.noise) for own in all_claims if own.noise > 0])
    parts = {"finals": ends["inside"], "chosen": chosen["inside"], "points": lines[lines["curve"]]["inside"]}
    for name, own in {**parts, "readable": readable}.items():
        found |= {name: int(own.sum()), f"{name}_of": len(own)}
    threshold = number(100 * CLAIMS["collapsed"]["below"])
    return found | {"collapsed": "; ".join(lost) or "none", "threshold": threshold, "missing": not_reproduced()}


@word
def of_reports(name, *arguments):
    """Return a table about the reports."""
    tables = {"curves": curves_table, "finals": finals_table, "verdicts": verdicts_table, "search": search_table}
    rows = tables[name](*arguments)
    return markdown(rows) if rows else ""


def counts(points):
    """Return how many points of a curve are inside, on test and on train."""
    own = [points[points["metric"].str.startswith(part)]["inside"].dropna() for part in ("test", "train")]
    return [f"{int(part.sum())} of {len(part)}" if len(part) else NONE for part in own]


def curves_table():
    rows = [["published curve", "test, inside", "train, inside", "half rule", "final, published", "ours, 95 % PI"]]
    for row, points in curves().items():
        metric = main_metric(variant(row, "paper"))
        regime = "**not reproduced**" if row in not_reproduced() else "not rejected"
        final = number(scale(metric) * published_value(row, metric, 0, "last"))
        own = prediction(metric, values(variant(row, "paper"), metric))
        rows.append([row.replace("_", " "), *counts(points), regime, final, own])
    return rows


def finals():
    """Return the published final results on test; the last value where two are printed."""
    lines = printed().dropna(subset="inside")
    ends = lines[lines["final"] & lines["metric"].str.fullmatch("test.*(?<!mean)")]
    return ends.sort_values("chosen", kind="stable").drop_duplicates(["row", "metric"], keep="last")


def finals_table():
    rows = []
    for line in finals().itertuples():
        name = f"{line.row}, {re.sub('test_(perplexity_)?', '', line.metric)}".replace("_", " ")
        runs, is_best = variant(line.row, "paper"), line.chosen == "best"
        own = prediction(line.metric, best(runs, line.metric) if is_best else values(runs, line.metric))
        name += ", best of the run" * is_best
        rows.append([name, number(scale(line.metric) * line.value), own, "yes" if line.inside else "**no**"])
    return [["table and test", "published", "ours, 95 % PI", "inside"], *sorted(rows)]


def verdicts_table():
    groups = ["conclusions, regime not rejected", "conclusions, regime not reproduced"]
    groups += ["our reformulations of them", "our own claims, exploratory"]
    found = Counter((groups[missing], verdict) for verdict, missing in drawn().values())
    for own in (own for family in SPEECHES for own in family_of(family)):
        if own.by == OURS or "reformulates" in own.entry:
            found[groups[2 + (own.by == OURS)], own.verdict] += 1
    return [["", *VERDICTS], *([group, *(str(found[group, verdict]) for verdict in VERDICTS)] for group in groups)]


def search_table(row):
    """Return how many points of a curve each setting of a search fits, with the noise of our own row."""
    runs, lines = where({"config.study": f"search_{row}", "baseline.name": None}), printed()
    rows, lines = [], lines[(lines["row"] == row) & lines["curve"]]
    skipped = ("seed=", "hydra")
    settings = runs["overrides"].map(lambda words: " ".join(own for own in words if not own.startswith(skipped)))
    for _, own in runs.groupby(settings) if len(runs) else ():
        points = lines.assign(inside=[inside(line, own, variant(row, "paper")) for line in lines.itertuples()])
        ends = [mean_and_sd(metric, values(own, metric)) for metric in ("test_accuracy", "train_accuracy")]
        order = -points["inside"].sum(), -values(own, "test_accuracy").mean()
        rows.append((order, [ANY, *counts(points), *ends, str(len(own))]))
    header = ["setting", "test, inside", "train, inside", "test, %", "train, %", "seeds"]
    return [header, *(cells for _, cells in sorted(rows, key=lambda pair: pair[0]))] if rows else []


@word
def strongest(metric):
    """Return the best model of the reports and the best baseline beside it."""
    sign = -1 if "perplexity" in metric else 1
    means = {row: sign * values(variant(row, "paper"), metric).mean() for row in reported()}
    row = max((own for own in means if means[own] == means[own]), key=means.get)
    beside = {name: variant(row, "paper", name) for name in LABELS["baselines"]}
    known = {name: values(own, metric).iloc[0] for name, own in beside.items() if len(values(own, metric))}
    name = max(known, key=lambda own: sign * known[own])
    terms = [(1, variant(row, "paper"), metric), (-1, beside[name], metric)]
    less = over_sentences(terms) if metric in PARTS else of_terms([(*term, None) for term in terms], 0.0)
    own = {"value": sign * means[row], "counted": known[name]}
    words = {key: number(scale(metric) * found) for key, found in own.items()}
    return {**words, "less": estimate(less), "baseline": LABELS["baselines"][name]}


@word
def runs():
    """Return how many runs the reports have, of which commits."""
    own = finished()[finished()["archive"] == "reference"]
    trained = own[own["baseline.name"].isna()]
    free = ["study", "threads", "checkpoint_every", "keep_every_n_steps", "trainer.log_every_n_steps", "logger.name"]
    settings = trained.filter(regex=r"^config\.|^corpus\.sha256")
    settings = settings.drop(
        columns=[f"config.{key}" for key in [*PUBLISHED["free"], *free, "force"]], errors="ignore"
    )
    current = int(re.search(r"NUMERICS_VERSION = (\d+)", (ROOT / "speechformer/runs/identity.py").read_text())[1])
    commits = Counter(trained["commit"].fillna("unknown")).most_common()
    names = [f"{name[:7]}{' with changes' * name.endswith('-dirty')} ({count})" for name, count in commits]
    old = int((trained["numerics"].fillna(1) < current).sum())
    rest = f"{old} of them of an earlier version of the numerics" if old else "all of today's numerics"
    return {
        "count": len(trained),
        "distinct": len(settings.astype(str).drop_duplicates()),
        "baselines": len(own) - len(trained),
        "hours": number((own["seconds"] / own["machine.ensemble_size"].fillna(1)).sum() / 3600),
        "origin": f"The runs are of commit {' and '.join(names)}, {rest}",
        "threads": ", ".join(sorted({f"{int(one)}" if one == one else "None" for one in trained["machine.threads"]})),
    }


@word
def record(path, **settings):
    """Return a line of a CSV file."""
    lines = pd.read_csv(REFERENCE / path)
    return lines[np.all([lines[key] == own for key, own in settings.items()], axis=0)].iloc[0].to_dict()


# Ladders


def plain(override):
    """Return an override with its number as Python writes it."""
    key, _, own = override.partition("=")
    return f"{key}={float(own):g}" if re.fullmatch(r"[\d.e-]+", own) else f"{key}={own.lower()}"


@functools.cache
def rungs(study):
    """Return the rungs of a ladder: what each adds (`step`) to another (`below`), and its runs."""
    own, found, last = where({"config.study": study, "baseline.name": None}), [], {}
    skipped = ("seed=", "study=", "experiment=", "corpus=", "hydra", "threads=")
    of_runs = own["overrides"].map(lambda words: [plain(word) for word in words if not word.startswith(skipped)])
    for line in CLAIMS["ladders"][study].strip().splitlines():
        depth = len(line) - len(line.lstrip("+"))
        name, _, words = line.lstrip("+ ").rpartition(": ")
        below = last.get(max(depth - 1, 0))
        step = words.split() if below or "=" in words else []
        whole = [*(below.whole if below else []), *map(plain, step)]
        path = [*(below.path if below and below.depth else []), *step]
        chosen = own[[words == whole for words in of_runs]]
        rung = {
            "name": name,
            "step": step,
            "whole": whole,
            "path": path,
            "below": below,
            "runs": chosen,
            "depth": depth,
        }
        last[depth] = SimpleNamespace(**rung)
        found.append(last[depth])
    return found


def stepped(rung, below, metric):
    """Return the effect of a step."""
    return contrast(scale(metric), [(1, mixed(rung.runs, metric)), (-1, mixed(below.runs, metric))])


@functools.cache
def with_verdicts(study, metric):
    """Return each rung with the effect of its step and the verdict."""
    both = [(rung, mixed(rung.runs, metric), rung.below and mixed(rung.below.runs, metric)) for rung in rungs(study)]
    own = [
        (rung, stepped(rung, rung.below, metric))
        for rung, one, other in both
        if rung.below and len(one) and len(other)
    ]
    sign = -1 if "perplexity" in metric else 1
    verdicts = (
        "Inconclusive" if not p < 0.05 else "Better" if sign * effect.mean > 0 else "Worse"
        for (_, effect), p in zip(own, holm([effect.p for _, effect in own]))
    )
    return [(*pair, verdict) for pair, verdict in zip(own, verdicts)]


@word
def ladder(study, *metrics, first="the first rung"):
    """Return the table of a ladder."""
    rows = [["step", *(LABELS["metrics"][metric] for metric in metrics), "seeds"]]
    known = {(id(rung), metric): rest for metric in metrics for rung, *rest in with_verdicts(study, metric)}
    is_ladder = sum(not rung.depth for rung in rungs(study)) > 1
    for rung in rungs(study):
        path = "<br>".join(f"`{own}`" for own in rung.path) if rung.below else first
        cells = [f"*beside:* {path}" if rung.depth and is_ladder else path]
        for metric in metrics:
            effect, verdict = known.get((id(rung), metric), (None, ""))
            bold = "**" * (verdict in ("Better", "Worse"))
            mean = number(scale(metric) * mixed(rung.runs, metric).mean())
            cells.append(mean + (f"<br>{bold}{estimate(effect)}{bold}" if effect else ""))
        rows.append([*cells, str(len(rung.runs))])
    for name, words in LABELS["baselines"].items():
        if len(counted := beside(rungs(study)[0].runs, name)):
            own = [values(counted, metric).mean() for metric in metrics]
            rows.append([f"*{words}*", *(number(scale(m) * one) for m, one in zip(metrics, own)), "exact"])
    return markdown(rows)


@word
def steps(study, metric):
    """Return which steps of a ladder change a metric."""
    groups = {"Better": [], "Worse": [], "Inconclusive": []}
    for rung, effect, verdict in with_verdicts(study, metric):
        code = " ".join(f"`{own}`" for own in rung.step)
        groups[verdict].append(f"{code}{', beside' * bool(rung.depth)} ({number(effect.mean, True)})")
    groups["Inconclusive"] = [f"the other steps ({len(groups['Inconclusive'])})"]
    lines = [f"- **{verdict}**: {'; '.join(texts)}." for verdict, texts in groups.items() if texts]
    top = [rung for rung in rungs(study) if not rung.depth]
    if len(top) > 1:
        lines.append(f"- **The whole ladder**: {estimate(stepped(top[-1], top[0], metric))}.")
    return "\n".join(lines)


@word
def step(study, metric, words):
    """Return the verdict on a step and its effect."""
    texts = []
    for rung, effect, verdict in with_verdicts(study, metric):
        if [*map(plain, rung.step)] == [*map(plain, words.split())]:
            corrected = " after correction" * bool(verdict == "Inconclusive" and math.prod(effect.interval) > 0)
            texts.append(f"{verdict.lower()}{corrected}, {estimate(effect)}")
    return "; ".join(texts)


@word
def ratio(name, metric, *baselines, mixture=False):
    """Return a perplexity as a ratio to that of the best baseline."""
    own = (mixed if mixture else values)(variant(name), metric).mean()
    return number(own / min(values(variant(name, None, other), metric).iloc[0] for other in baselines))


@word
def against(named, *baselines):
    """Return what variants have less than baselines on each text."""
    rows = [["", "ratio to, minus", "mean", "obama", "wbush", "hbush"]]
    for (called, name), baseline in itertools.product(named.items(), baselines):
        for metric, subset in (("test_perplexity", "all words"), ("test_known_perplexity", "known words")):
            cells = []
            for text in rows[0][2:]:
                own = (mixed if called == "with counts" else values)(variant(name), f"{metric}_{text}")
                other = values(variant(name, None, baseline), f"{metric}_{text}")
                effect = contrast(1, [(1, own)], -other.iloc[0]) if len(other) else None
                cells.append(f"{number(own.mean() / other.iloc[0])}<br>{estimate(effect)}" if effect else NONE)
            rows.append([f"{called}, {subset}", LABELS["baselines"][baseline], *cells])
    return markdown(rows)


@word
def less(name, baseline):
    """Return the accuracy of a variant less that of a baseline, over seeds and sentences."""
    own = variant(name)
    effect = over_sentences([(1, own, "test_accuracy"), (-1, variant(name, None, baseline), "test_accuracy")])
    return estimate(effect) if len(own) > 1 else f"{number(effect.mean, True)} {NONE}"


@word
def against_baselines(name, *baselines, called):
    """Return the accuracy of a variant and of baselines, and what the variant has more."""
    rows = [["", "test accuracy, %", f"{called} minus the baseline, points"]]
    rows.append([called, mean_and_sd("test_accuracy", values(variant(name), "test_accuracy")), NONE])
    for other in baselines:
        own = value(name, "test_accuracy", baseline=other, show="mean")
        rows.append([LABELS["baselines"][other], own, less(name, other)])
    return markdown(rows)


@word
def difficulty(name, *baselines):
    """Return how many test sentences most seeds of a variant and baselines get right."""
    every = [answers(variant(name, None, other)).mean(axis=0) > 0.5 for other in (None, *baselines)]
    model, *others = every
    shares = {
        "all are right": np.all(every, axis=0),
        "at least one is right": np.any(every, axis=0),
        "none is right": ~np.any(every, axis=0),
        "the transformer alone is right": model & ~np.any(others, axis=0),
        "the transformer alone is wrong": ~model & np.all(others, axis=0),
    }
    rows = [[words, str(own.sum()), number(100 * own.mean())] for words, own in shares.items()]
    return markdown([["", "sentences", "%"], *rows])


@word
def learning_curve(names, *baselines):
    """Return the accuracy of variants and of baselines by the size of train, and what a doubling adds."""
    sizes = [int(variant(name).iloc[0]["corpus.counts.train"]) for name in names]
    own = {
        name: [100 * values(variant(name, None, other), "test_accuracy") for other in (None, *baselines)]
        for name in names
    }
    rows = [["sentences in train", "the transformer", *(LABELS["baselines"][other] for other in baselines)]]
    for size, (model, *others) in zip(sizes, own.values()):
        cells = f"{number(model.mean())} ± {number(model.std())}" if len(model) > 1 else number(model.mean())
        rows.append([str(size), cells, *(number(other.iloc[0]) for other in others)])
    half = max((k for k, size in enumerate(sizes) if math.log2(sizes[-1] / size) > 0.9))
    doublings = math.log2(sizes[-1] / sizes[half])
    gains = [last.mean() - before.mean() for before, last in zip(own[names[half]], own[names[-1]])]
    head = f"for each doubling from {sizes[half]} to {sizes[-1]} sentences"
    return markdown([*rows, [head, *(number(gain / doublings, True) for gain in gains)]])


# Probes


def mechanism_in_words(names):
    """Return the attention of one or several layers in words."""
    return ", then ".join(LABELS["settings"].get(f"attention={name}", name) for name in names)


def mechanism(run):
    """Return the name of the attention of a run in words."""
    layers, heads = run["config.attention.layers"], run["config.attention.kv_heads"]
    names = layers if isinstance(layers, list) else [run["config.attention.name"]]
    words = mechanism_in_words(names)
    return words if heads != heads else f"{words}, key heads {heads:g}"


@functools.cache
def cells(of="probes", study=None):
    """Return a row for each run of a probe and length, with where it stands; of `mechanisms`, these are the models.

    Runs whose command has no setting that was tuned stand where nothing is tuned. Where a model has no such runs, or
    tuning has chosen the same settings for it, its tuned runs stand in both places.
    """
    own, found = where({"archive": of, "config.study": study or of, "task": "probe"}), []
    for run in own.to_dict("records"):
        pattern = run["config.pattern.name"]
        by_layer = {axis: isinstance(run[f"config.{axis}.layers"], list) for axis in ("model", "pattern")}
        at = {
            "probe": run["config.probe.name"],
            "model": LABELS["settings"][f"model={run['config.model.name']}"] + f", {ANY}" * by_layer["model"],
            "pattern": LABELS["settings"].get(f"pattern={pattern}", pattern) + ANY * (pattern != "full"),
            "layers": run["config.layers"],
            **{f"{axis}_key": f"{run[f'config.{axis}.name']} {run[f'config.{axis}.layers']}" for axis in by_layer},
            **({"model": mechanism(run), "model_key": mechanism(run)} if of == "mechanisms" else {}),
            "settings": f"{run['config.recipe.lr']} {run['config.recipe.init']}",
            "seed": run["seed"],
            "chosen": any(word.startswith("recipe.") for word in run["overrides"]),
            "longest": int(run["config.probe.max_length"]),
        }
        for length in run["config.probe.test_lengths"]:
            numbers = {
                key: run.get(f"metrics.{key}_accuracy_length_{length}", math.nan) for key in ("test", "chance")
            }
            found.append({**at, "length": length, **numbers})
    frame, key = pd.DataFrame(found), ["probe", "model_key", "pattern_key", "layers"]
    of_settings = frame.groupby([*key, "settings"])["chosen"]
    has_default = ~frame.groupby(key)["chosen"].transform("all")
    sides = {True: of_settings.transform("any"), False: ~(of_settings.transform("all") & has_default)}
    frame = pd.concat([frame[own].assign(tuned=tuned) for tuned, own in sides.items()], ignore_index=True)
    return frame.drop_duplicates([*key, "settings", "seed", "length", "tuned"])


def usual(frame, by):
    """Return the rows that differ in one axis alone: of all such groups the one with most values of it."""
    axes = [axis for axis in ("model_key", "pattern_key", "layers", "tuned") if not axis.startswith(by)]
    by = by if by == "layers" else f"{by}_key"
    sizes = frame.dropna(subset="test").groupby(axes).agg(n=(by, "nunique"), runs=("test", "size")).reset_index()
    most = sizes.sort_values(["n", "tuned", "runs"]).iloc[-1]
    return frame[np.all([frame[axis] == most[axis] for axis in axes], axis=0)]


def in_cell(frame):
    """Return mean and standard deviation of some rows."""
    own = frame["test"].dropna()
    return mean_and_sd("accuracy", own) if len(own) else NONE


@word
def probes(by="model", fixed=None, of="probes", **lengths):
    """Return the accuracies on probes, each at one length."""
    frame = cells(of)
    for axis, wanted in (fixed or {}).items():
        frame = frame[frame[axis] == wanted]
    frame = frame[[lengths.get(row.probe) == row.length for row in frame.itertuples()]]
    skills, rows = {}, {}
    for name, own in usual(frame, by).groupby("layers" if by == "layers" else f"{by}_key", sort=False):
        parts = [own[own["probe"] == probe] for probe in lengths]
        above = [((part["test"].mean() - part["chance"].mean()) / (1 - part["chance"].mean())) for part in parts]
        skills[name] = np.nan_to_num(np.clip(above, 0, 1)).sum()
        rows[name] = [str(own[by].iloc[0]), *(in_cell(part) for part in parts)]
    head = ["", *(f"{probe.replace('_', ' ')}, {length}" for probe, length in lengths.items())]
    return markdown([head, *(rows[name] for name in sorted(rows, key=lambda name: -skills[name]))])


def at_longest(beyond, of="probes"):
    """Yield each probe with its usual rows at the longest length of training, or the longest beyond it."""
    for probe, own in usual(cells(of), "model").groupby("probe"):
        own = own[(own["length"] > own["longest"]) == beyond]
        if len(own):
            yield f"{probe.replace('_', ' ')}, {own['length'].max()}", own[own["length"] == own["length"].max()]


def welch(one, other):
    """Return the p-value of Welch's test; NaN where nothing varies."""
    one, other = one.dropna(), other.dropna()
    return contrast(1, [(1, pd.Series([*one])), (-1, pd.Series([*other], 1000 + np.arange(len(other))))]).p


@word
def separations(beyond, without=()):
    """Return the best and the worst model on each probe, and how many pairs of models differ."""
    rows, pairs = [["probe, length", "best", "worst", *without, "chance", "pairs separated"]], []
    for at, frame in at_longest(beyond):
        by_model = {name: own for name, own in frame.groupby("model", sort=False)}
        own = {name: part for name, part in by_model.items() if name not in without and part["test"].count() >= 5}
        means = {name: part["test"].mean() for name, part in own.items()}
        named = [f"{name} {in_cell(own[name])}" for name in (max(means, key=means.get), min(means, key=means.get))]
        trained = f" (trained to {frame['longest'].iloc[0]})" * beyond
        beside = [in_cell(by_model[name]) for name in without]
        rows.append([at + trained, *named, *beside, number(100 * frame["chance"].iloc[0])])
        pairs.append([welch(a["test"], b["test"]) for a, b in itertools.combinations(own.values(), 2)])
    corrected = iter(holm([*itertools.chain(*pairs)]))
    for row, own in zip(rows[1:], pairs):
        row.append(f"{sum(p < 0.05 for p in itertools.islice(corrected, len(own)))} of {len(own)}")
    return markdown(rows)


@word
def tuning(beyond, of="probes"):
    """Return what tuning changes on each probe."""
    rows = [["probe, length", "as by default", "tuned", "change", "other settings chosen", "largest", "smallest"]]
    same = ["probe", "length", "layers", "pattern_key"]
    for at, new in at_longest(beyond, of):
        old = cells(of)[~cells(of)["tuned"]].merge(new[same].drop_duplicates(), on=same)
        by_model = (own.groupby("model").agg({"test": "mean", "settings": "first"}) for own in (old, new))
        both = pd.concat([next(by_model).add_suffix("_old"), next(by_model).add_suffix("_new")], axis=1).dropna()
        change = 100 * (both["test_new"] - both["test_old"])
        other = change[both["settings_old"] != both["settings_new"]]
        extremes = [other.idxmax(), other.idxmin()] if len(other) else []
        named = [f"{name} {number(other[name], True)}" for name in extremes] or [NONE, NONE]
        means = [number(100 * both[side].mean()) for side in ("test_old", "test_new")]
        rows.append([at, *means, number(change.mean(), True), f"{len(other)} of {len(both)}", *named])
    return markdown(rows)


@word
def retuned(probe, length):
    """Return what encodings have on a probe with the settings that more tuning seeds chose."""
    key, rows = ["model_key", "pattern_key", "layers"], []
    again = cells(study="probes_tuning_rule").query("probe == @probe and length == @length and tuned")
    for name, new in again.groupby("model"):
        old = cells().query("probe == @probe and length == @length").merge(new[key].drop_duplicates(), on=key)
        rows.append([name, *(in_cell(old[old["tuned"] == tuned]) for tuned in (False, True)), in_cell(new)])
    head = [f"{probe.replace('_', ' ')}, {length}", "as by default", "tuned with one seed", "tuned with three seeds"]
    return markdown([head, *rows])


@word
def longer():
    """Return where each comparison of two encodings beyond the lengths of training is supported."""
    frame, compared, found = usual(cells(), "model"), [], {}
    frame = frame[frame["length"] > frame["longest"]]
    for (probe, length), own in frame.groupby(["probe", "length"]):
        for pair in CLAIMS["longer"]:
            names = [LABELS["settings"][f"model={pair[side]}"] for side in ("better", "worse")]
            one, other = (own[own["model"] == name]["test"].dropna() for name in names)
            if len(one) and len(other):
                compared.append((f"{names[0]} − {names[1]}", f"{probe.replace('_', ' ')} {length}", one, other))
    for (names, place, one, other), p in zip(compared, holm([welch(*own[2:]) for own in compared])):
        verdict = "not tested" if p != p else "supported" if one.mean() > other.mean() else "contradicted"
        found.setdefault(names, {}).setdefault("inconclusive" if p > 0.05 else verdict, []).append(place)
    rows = [["claim: above 0", "supported", "contradicted", "inconclusive", "not tested"]]
    for names, own in found.items():
        named = [", ".join(own.get(verdict, [])) or NONE for verdict in rows[0][1:3]]
        rows.append([names, *named, *(str(len(own.get(verdict, []))) for verdict in rows[0][3:])])
    return markdown(rows)


# Mechanisms


class Unknown(float):
    """A number that is not recomputed."""

    def __format__(self, how):
        return SIZE

    def __mul__(self, other):
        return self

    def __floordiv__(self, other):
        return self


@functools.cache
def losses():
    """Return the losses of each mechanism on each corpus, by seed."""
    runs = where({"archive": "mechanisms", "task": "lm"})
    runs = runs.assign(mechanism=[mechanism(run) for run in runs.to_dict("records")])
    own = {corpus: part.groupby("mechanism") for corpus, part in runs.groupby("corpus.name")}
    return {
        corpus: {name: np.log(values(one, main_metric(one))) for name, one in part} for corpus, part in own.items()
    }


@functools.cache
def scores():
    """Return how far each mechanism is from chance to 1 on each probe, mean over lengths, and the mean of these."""
    tuned = cells("mechanisms")[cells("mechanisms")["tuned"]]
    means = tuned.groupby(["model", "probe", "length"])[["test", "chance"]].mean()
    skill = ((means["test"] - means["chance"]) / (1 - means["chance"])).clip(0, 1)
    found = skill.groupby(["model", "probe"]).mean().unstack().dropna()
    return found.assign(mean=found.mean(axis=1))


def correlation(corpus, probe="mean"):
    """Return Spearman's correlation of scores and losses with percentiles of samples, and whether these exclude 0."""
    table = pd.DataFrame(
        {"x": scores()[probe], "y": {name: own.mean() for name, own in losses()[corpus].items()}}
    ).dropna()
    drawn = np.random.default_rng(0).integers(len(table), size=(10_000, len(table)))
    with np.errstate(invalid="ignore"):
        samples = [stats.pearsonr(*stats.rankdata(table.to_numpy()[own], axis=0).T)[0] for own in drawn]
    low, high = np.nanquantile(samples, (0.025, 0.975))
    rho = stats.spearmanr(table["x"], table["y"]).statistic
    return f"{number(rho, True)} {interval(low, high, True)}", "excludes" if low * high > 0 else "includes"


def of_mechanism(names, at):
    """Return by seed the accuracies of a mechanism on a probe at a length, or its losses on a corpus."""
    name = mechanism_in_words(names.split(","))
    if "corpus" in at:
        return losses()[at["corpus"]].get(name, pd.Series(dtype=float))
    own = cells("mechanisms")[cells("mechanisms")["tuned"]]
    own = own[(own["model"] == name) & (own["probe"] == at["probe"]) & (own["length"] == at["length"])]
    return own.set_index("seed")["test"]


def measure_mechanism(name, entry):
    """Return a claim on two mechanisms; None without runs."""
    at, metric = entry["effect"], "test_accuracy" if "probe" in entry["effect"] else "loss"
    terms = [(1, of_mechanism(at["of"], at)), (-1, of_mechanism(at["less"], at))]
    if any(own.empty for _, own in terms):
        return None
    effect, sign = contrast(scale(metric), terms), {"more": 1, "less": -1, "same": 0}[entry["expect"]]
    rest = {
        "is_small": False,
        "is_at_ceiling": False,
        "published": math.nan,
        "regime": False,
        "known": "",
        "relative": "",
    }
    about = {"says": entry["says"], "by": entry["by"], "entry": entry, "sign": sign, "lowest": math.nan}
    return SimpleNamespace(name=name, estimated=effect, effect=estimate(effect), **about, **rest)


@word
def mechanisms():
    """Return the words of the page of mechanisms."""
    file = REFERENCE / "mechanisms" / "steps.json"
    steps = {row["name"]: row for row in json.loads(file.read_text("utf-8"))["rows"]}

    def times(row):
        if row["ratio"] is None:
            return f"1 ({number(1000 * np.median(row['seconds']['softmax']))} ms)"
        return f"{number(row['ratio'])} {interval(*row['interval'])}"

    def costs():
        rows = [["", "mean score", "numbers kept", "a step, times softmax", *(f"loss, {name}" for name in losses())]]
        for name, score in scores()["mean"].sort_values(ascending=False, kind="stable").items():
            shown = (mean_and_sd("loss", own[name]) if name in own else NONE for own in losses().values())
            rows.append([name, number(100 * score), SIZE, times(steps[name]), *shown])
        return markdown(rows)

    def correlations():
        rows = [["score", *(f"loss on {corpus}" for corpus in losses())]]
        for probe in scores():
            own = ("; ".join(correlation(corpus, probe)) for corpus in losses())
            rows.append([probe.replace("_", " "), *(f"{text} 0" for text in own)])
        return markdown(rows)

    def of_probe(probe, length, *studies):
        runs = where({"archive": "mechanisms", "task": "probe", "config.probe.name": probe})
        runs = runs[runs["config.study"].isin(studies)].copy()
        runs["mechanism"] = [mechanism(run) for run in runs.to_dict("records")]
        return runs.assign(test=runs[f"metrics.test_accuracy_length_{length}"])

    def crossed(runs, column):
        shown = runs.groupby(["mechanism", column])[["test"]].apply(in_cell).unstack()
        shown = shown[shown.notna().sum(axis=1) > 1].dropna(axis=1, how="all").fillna(NONE)
        return markdown([["", *shown], *([name, *row] for name, row in zip(shown.index, shown.to_numpy()))])

    def positions(length):
        runs = of_probe("recall", length, "mechanisms", "mechanisms_positions")
        layers = zip(runs["config.model.layers"], runs["config.model.name"])
        last = [own[-1] if isinstance(own, list) else name for own, name in layers]
        return crossed(runs.assign(position=[LABELS["settings"][f"model={name}"] for name in last]), "position")

    def rates(**lengths):
        tuning = [
            (f"{probe}, {length}, at ", of_probe(probe, length, "mechanisms_tuning"))
            for probe, length in lengths.items()
        ]
        columns = [runs.assign(rate=at + runs["config.recipe.lr"].astype(str)) for at, runs in tuning]
        return crossed(pd.concat(columns), "rate")

    def two_groups():
        found = []
        for at, frame in at_longest(False, "mechanisms"):
            apart = sorted(name for name, own in frame.groupby("model") if is_bimodal(own["test"].dropna()))
            found += [f"{at}: {'; '.join(apart)}"] if apart else []
        return " and ".join(found) or "none"

    return SimpleNamespace(
        accuracies=functools.partial(probes, "model", {"tuned": True}, "mechanisms"),
        compared=lambda corpus: len({*scores().index} & {*losses()[corpus]}),
        correlation=correlation,
        correlations=correlations,
        costs=costs,
        positions=positions,
        rates=rates,
        state=lambda name: Unknown(),
        step=lambda names: times(steps[mechanism_in_words(names.split(","))]),
        tuning=functools.partial(tuning, of="mechanisms"),
        two_groups=two_groups,
    )


def is_bimodal(own):
    """Return whether values form two groups: a gap that fewer than one in 200 normal samples exceed."""
    if len(own) < 5 or not varies(own):
        return False
    ordered = np.sort(own)
    place = np.diff(ordered).argmax() + 1
    squares = sum(group.var() * len(group) for group in (ordered[:place], ordered[place:]))
    within = max(math.sqrt(squares / (len(own) - 2)), 0.01 * abs(ordered).max())
    return ordered[place] - ordered[place - 1] > (3 + 350 / len(own) ** 2) * within


WORDS["table"] = str  # tables are markdown already


# Pages


def differences(page, own):
    """Yield (line, what is wrong) of a page, and count its numbers that are right."""
    for count, (line, other) in enumerate(zip_longest(page.splitlines(), own.splitlines(), fillvalue=""), start=1):
        pattern = "".join(
            {ANY: "[^|]*?", SIZE: r"[\d,]+"}.get(part) or (NUMBER.pattern if k % 2 else re.escape(part))
            for text in re.split(f"([{ANY}{SIZE}])", other)
            for k, part in enumerate(NUMBER.split(text))
        )
        found = re.fullmatch(pattern, line)
        if not found:
            yield count, f"{line!r} should be {other!r}", 0
            continue
        for shown, wanted in zip(found.groups(), NUMBER.findall(other)):
            yield count, "" if is_rounded(shown, wanted) else f"{shown} should be {wanted} in {line[:150]!r}", 1


def is_rounded(shown, wanted):
    """Return whether a number of a page is another one, rounded."""
    if not NUMBER.fullmatch(shown):
        return False
    value, exact = (float(text.replace(",", "").replace("−", "-")) for text in (shown, wanted))
    if (wanted[0] == "+" and value and shown[0] != "+") or (shown.lstrip("+−") == "0" and exact):
        return False
    digits, _, exponent = shown.replace("−", "-").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(value - exact) <= 0.5 * unit + 1e-6 * min(abs(exact), 1e5)


def main(arguments=None):
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies.check", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of the pages (default: this checkout)")
    parser.add_argument("--page", choices=PAGES, nargs="*", default=[*PAGES], help="only these pages")
    options = parser.parse_args(arguments)
    loader = jinja2.FileSystemLoader(ROOT / "studies" / "pages")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    failed = False
    for name in options.page:
        own = environment.get_template(f"{name}.md").render(WORDS)
        _, _, page = (options.root / PAGES[name]).read_text("utf-8").partition("\n")
        found = [*differences(page, own)]
        wrong = [(line, text) for line, text, _ in found if text]
        failed |= bool(wrong)
        print(f"{PAGES[name]}: {sum(count for *_, count in found)} numbers compared, {len(wrong)} differ")
        for line, text in wrong:
            print(f"{PAGES[name]}:{line + 1}: {text}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
