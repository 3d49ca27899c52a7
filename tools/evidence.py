"""The answer of docs/evidence.md, its claims and tasks, from results/evidence/summary.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.evidence.contenders import BASES
from benchmarks.evidence.statistics import sign_test

from gadam.runs.files import Document
from tools import ROOT, evidence_details
from tools import evidence_summary as summary
from tools.evidence_summary import POINTS, TASKS, table

__all__ = ["TABLES"]

REFERENCES = ("Gadam", "GadamX")  # of the tables
DROP_IN = "Gadam, last quarter"  # what the README's first example trains

# ------------------------------------------------------------------------------------------ answer

# Where a reader may be, and the tasks that are like it.
SITUATIONS = {
    "Labels are wrong": ("fashion-noisy", "cifar100n-5k"),
    "Labels are right, and the network overfits": ("fashion-clean", "cifar100-2k"),
    "Training is short: the loss still falls at the end": (
        "imagenet32-short",
        "ptb-transformer-short",
        "ptb-lstm-short",
    ),
}


def answer() -> str:
    """Return the answer in a paragraph, by the confirmation on new seeds."""
    found = summary.read().get("confirmation", {}).get("tasks", {})
    again = {name: one["decayed"] for name, one in found.items() if "decayed" in one}
    if not again:
        return "No final runs yet."
    ahead = [name for name in TASKS if name in again and again[name]["interval"][0] > 0]
    behind = [name for name in TASKS if name in again and again[name]["interval"][1] < 0]
    sizes = [f"{_confirmed_gain(name, again[name])} on {_title(name)}" for name in ahead]
    sentences = [
        f"On {len(again)} small tasks, the best average beats the best decayed schedule on "
        f"{len(ahead)}, loses on {len(behind) or 'none'}, and ties on the other "
        f"{len(again) - len(ahead) - len(behind)} (95% intervals, on seeds that chose nothing).",
        f"The gains are {_and(sizes)}." if sizes else "",
        _ahead_of("it"),
    ]
    labels = {name: row["label"] for name in TASKS if (row := _best_average(name)) is not None}
    counts = Counter(label.partition(",")[0] for label in labels.values()).most_common()
    shares = [f"{base}'s on {count}" for base, count in counts]
    sentences.append(f"The best average is {_and(shares)}.")
    for word, words in (("eased", "an eased rate"), ("interpolated", "interpolation")):
        titles = [_title(name) for name, label in labels.items() if word in label]
        if titles:
            sentences.append(f"It uses {words} on {_and(titles)}.")
    sentences += _not_final()
    sentences.append("All networks are small: nothing here was tested at scale.")
    return " ".join(filter(None, sentences))


def _not_final() -> list[str]:
    """Return a sentence per task in which the runs of the best method are not finished."""
    found = []
    for name in TASKS:
        task = summary.task(name)
        row = summary.best(task, [row for row in task["rows"] if row["validation"] is not None])
        if row is not None and not summary.is_final(row, task):
            found.append(
                f"Not final: on {task['title']}, {row['label']} has the best validation "
                f"{task['metric']}, {row['validation']:.1f}, but its runs are not finished."
            )
    return found


def _confirmed_gain(name: str, one: Document) -> str:
    """Return a gain on new seeds, in points of accuracy or in percent of the perplexity."""
    if summary.task(name)["metric"] == "perplexity":
        return f"{100 * one['mean'] / one['other']:.1f}% of the perplexity"
    return f"{one['mean']:.1f} points"


def _ahead_of(best_average: str) -> str:
    """Return the sentence that names the tasks where another method is significantly ahead."""
    leaders = {name: label for name in TASKS if (label := _leader(name)) is not None}
    if not leaders:
        return f"No other method is significantly ahead of {best_average} on any task."
    are_averages = all(label.endswith(", average") for label in leaders.values())
    who = "averages along a decayed schedule" if are_averages else "other methods"
    ahead = [f'"{label}" on {_title(name)}' for name, label in leaders.items()]
    return (
        f"On the seeds of the first comparison, {who} are significantly ahead of {best_average}: "
        f"{_and(ahead)}."
    )


def _leader(name: str) -> str | None:
    """Return the other method that is significantly ahead of the best average, if there is one."""
    ours, rival = _best_average(name), summary.champion(summary.task(name), "rival")
    if ours is None or rival is None:
        return None
    is_ahead = rival["differences"][ours["label"]]["interval"][0] > 0
    return str(rival["label"]) if is_ahead else None


def _best_average(name: str) -> Document | None:
    return summary.champion(summary.task(name), "average")


def _title(name: str) -> str:
    return str(summary.task(name)["title"])


def _and(words: Sequence[str]) -> str:
    *first, last = words or [""]
    if len(first) > 1:
        return f"{', '.join(first)}, and {last}"
    return f"{first[0]} and {last}" if first else last


def situations() -> str:
    """Return, per situation and task, the best average and its gains over other methods.

    It is chosen on validation data, and so is the best schedule that decays the rate.
    """
    rows = []
    for situation, names in SITUATIONS.items():
        for name in names:
            task, ours = summary.task(name), _best_average(name)
            if ours is None:
                continue
            average = POINTS.get(ours["point"], ours["point"])
            label = f"{ours['label']}, {average}" if average else ours["label"]
            decayed = summary.champion(task, "decayed")
            against = "" if decayed is None else f" ({decayed['label']})"
            cells = [
                _gain(task, ours, decayed) + against,
                _again(name),
                _gain(task, ours, _final(task).get("Schedule-Free AdamW")),
            ]
            rows.append([situation, task["title"], label, *cells])
            situation = ""
    header = ["situation", "task", "best average", "− best decayed schedule"]
    header += ["the same on new seeds", "− Schedule-Free AdamW"]
    caption = (
        "Gains in points of accuracy or in percent of the perplexity, with 95% intervals, paired "
        "by seed; positive is better. Bold intervals exclude zero; they are not corrected for the "
        "number of comparisons."
    )
    return table(header, rows, caption, left=3) if rows else "No final runs yet."


def _again(name: str) -> str:
    """Return the gain over the best decayed schedule on new seeds."""
    found = summary.read().get("confirmation", {}).get("tasks", {}).get(name, {})
    if (one := found.get("decayed")) is None:
        return ""
    task, ours = summary.task(name), _best_average(name)
    scale = 100 / one["other"] if task["metric"] == "perplexity" else 1
    interval = [scale * end for end in one["interval"]]
    cell = summary.with_interval(scale * one["mean"], interval, summary.unit(task))
    # The confirmation keeps the choice that was made before it.
    return cell if ours and ours["label"] == found["average"] else f"{cell} ({found['average']})"


def _final(task: Document) -> dict[str, Document]:
    return {row["label"]: row for row in task["rows"] if summary.is_final(row, task)}


def _gain(task: Document, ours: Document | None, other: Document | None) -> str:
    """Return the gain of ours over another method, with its interval."""
    if ours is None or other is None:
        return ""
    one = other["differences"].get(ours["label"])
    if one is None:
        return ""
    scale = 100 / other["mean"] if task["metric"] == "perplexity" else 1
    interval = [-scale * end for end in one["interval"]]
    return summary.with_interval(-scale * one["mean"], interval, summary.unit(task))


def overview() -> str:
    """Return the table of the README: what a user gains, from the first example to the best."""
    rows = []
    for name in TASKS:
        task, ours = summary.task(name), _best_average(name)
        decayed, rival = (summary.champion(task, role) for role in ("decayed", "rival"))
        if ours is None or rival is None:
            continue
        final = _final(task)
        drop_in = [
            _gain(task, final.get(DROP_IN), final.get(label))
            for label in ("AdamW, WSD", "AdamW, cosine")
        ]
        against = "" if decayed is None else f" ({decayed['label']})"
        cells = [ours["label"], _gain(task, ours, decayed) + against]
        cells.append(f"{_gain(task, ours, rival)} ({rival['label']})")
        rows.append([task["title"], *drop_in, *cells])
    if not rows:
        return "No task has final results yet."
    header = ["task", "Gadam − AdamW, WSD", "Gadam − AdamW, cosine", "best average"]
    header += ["− best decayed schedule", "− best other method"]
    seeds = min(summary.task(name)["seeds"] for name in TASKS)
    caption = (
        "Test metric: gains in points of accuracy, or in percent of the perplexity for Penn "
        f"Treebank, over {seeds} seeds, paired, with 95% intervals. Positive favors the average. "
        "Bold intervals exclude zero; they are not corrected for the number of comparisons. Every "
        "method has its own learning rate and weight decay, from 9 to 21 settings. Gadam is the "
        "README's first example: the average of the last quarter at a constant rate. The best "
        "average, the best decayed schedule, and the best other method are chosen on validation "
        "data. WSD holds the rate and decays it to zero over the last fifth of the steps."
    )
    return f"{table(header, rows, caption, left=4)}\n\n{_on_new_seeds()}".rstrip()


def by_optimizer() -> str:
    """Return the gain of the best average of each optimizer over its best decayed schedule."""
    rows = []
    for name in TASKS:
        found = summary.task(name)
        final = _final(found)
        gains = {}
        for base, chosen in found["champions by base"].items():
            ours, decayed = final[chosen["average"]], final[chosen["decayed"]]
            gains[base] = f"{_gain(found, ours, decayed)}, {ours['label']}"
        if gains:
            rows.append([found["title"], *(gains.get(base, "") for base in BASES)])
    caption = (
        "The best average of each optimizer minus its best decayed schedule, both chosen on "
        "validation data, and the name of the average. Gains are in points of test accuracy, or "
        "in percent of the perplexity, with 95% intervals, paired by seed; positive favors the "
        "average. Bold intervals exclude zero; they are not corrected for the number of "
        "comparisons."
    )
    header = ["task", *BASES]
    return table(header, rows, caption, left=len(header)) if rows else "No final runs yet."


# What the best average is compared with, and its role in the confirmation.
OPPONENTS = {"the best decayed schedule": "decayed", "the best other method": "rival"}


# A claim about averages at a constant rate alone, by its verdict.
ALONE = {
    "holds": "the best average beats {} too",
    "does not hold": "the best average does not beat {}",
    "cannot be said": "it cannot be said that the best average beats {}",
}


def _on_new_seeds() -> str:
    """Return what the confirmation says about the best average, and what it does not say."""
    found = summary.read().get("confirmation", {})
    claims = {claim["text"]: claim for claim in summary.read()["claims"]}
    rows = []
    alone: dict[str, list[str]] = {}  # by the verdict on averages at a constant rate
    for words, role in OPPONENTS.items():
        tests = [one[role] for one in found.get("tasks", {}).values() if role in one]
        if (pooled := found.get("pooled", {}).get(role)) is None:
            continue
        above = sum(one["interval"][0] > 0 for one in tests)
        below = sum(one["interval"][1] < 0 for one in tests)
        rows.append(
            [
                f"best average − {words.removeprefix('the ')}",
                f"{pooled['positive']} of {pooled['tasks']}",
                str(above),
                str(below),
                f"{pooled['p']:.2g}" + ("" if pooled["in favor"] else " against"),
            ]
        )
        plain = claims[f"The best average at a constant rate beats {words}."]
        alone.setdefault(plain["verdict"], []).append(words)
    if not rows:
        return ""
    first, *_, last = found["seeds"]
    header = [f"seeds {first}–{last}, all choices made before", "means above zero"]
    header += ["intervals above zero", "intervals below zero", "pooled p"]
    verdicts = [ALONE[verdict].format(" or ".join(words)) for verdict, words in alone.items()]
    sentences = [
        f"Without eased rates and interpolation, {'; '.join(verdicts)}.",
        _ahead_of("the best average"),
        *_not_final(),
        "All networks are small: half a minute of training per run.",
    ]
    return table(header, rows, " ".join(sentences))


# ------------------------------------------------------------------------------------------- tasks


def task(name: str) -> str:
    """Return the methods of a task, the best first.

    Args:
        name: The task.
    """
    found = summary.task(name)
    if not found["rows"]:
        return "No runs yet."
    rows = []
    for row in found["rows"]:
        rows.append(
            [
                row["label"],
                _setting(row),
                POINTS.get(row["point"], row["point"]) if row["averaged"] else "",
                f"{row['settings']}" if row["tuned"] else f"{row['settings']}, not done",
                f"{row['validation']:.2f}",
                _tested(row, found),
                *(_difference(row, reference) for reference in REFERENCES),
            ]
        )
    header = [
        "method",
        "learning rate, decay",
        "average",
        "settings tried",
        "validation",
        f"test {found['metric']}",
        *(f"− {reference} (Holm p)" for reference in REFERENCES),
    ]
    figure = ROOT / "docs" / "evidence" / f"{name}.svg"
    picture = f"![{found['title']}](evidence/{name}.svg)\n\n" if figure.exists() else ""
    return picture + table(header, rows, _caption(name, found), left=3)


def _caption(name: str, found: Document) -> str:
    examples = "" if found["examples"] is None else f" on {found['examples']:,} examples"
    missing = found["missing methods"]
    text = (
        f"{found['parameters']:,} parameters{examples}, {found['steps']:,} steps. Mean ± standard "
        f"error over {found['seeds']} seeds. Differences are paired by seed; positive is better "
        "than the reference. Holm's correction is over the rows of a column. "
        f"{found['records']} runs in {found['core hours']:.1f} core-hours with torch "
        f"{', '.join(found['torch'])}, on {'; '.join(found['machines'])}. Source: "
        f"`results/evidence/{name}.jsonl`, with the commit of each run."
    )
    if missing:
        text += f" **Not begun:** {', '.join(missing)}."
    if found["remaining runs"]:
        text += f" **About {found['remaining runs']} runs remain.**"
    return text


def _setting(row: Document) -> str:
    knobs = row["knobs"]
    own = f", {knobs['beta']:g}" if row["has own knob"] else ""
    return f"{knobs['lr']:g}, {knobs['weight_decay']:g}{own}"


def _tested(row: Document, found: Document) -> str:
    """Return the test metric, and the number of seeds if some are missing."""
    seeds = row["seeds"]
    missing = f" ({seeds} of {found['seeds']} seeds)" if 0 < seeds < found["seeds"] else ""
    return summary.mean(row) + missing


def _difference(row: Document, reference: str) -> str:
    one = row["differences"].get(reference)
    return "" if one is None else f"{one['mean']:+.2f} ({one['holm p']:.2g})"


# ------------------------------------------------------------------------------------------ claims


def claims() -> str:
    """Return every claim with its verdict."""
    rows = [
        [claim["text"], f"**{claim['verdict']}**", claim["reason"]]
        for claim in summary.read()["claims"]
    ]
    tests = [one for claim in summary.read()["claims"] for one in claim["comparisons"]]
    caption = (
        f"{len(tests)} tests in all, each with its difference and interval in "
        "`results/evidence/summary.json`."
    )
    return table(["claim", "verdict", "why"], rows, caption, left=3)


def confirmation() -> str:
    """Return the best methods of each task on seeds that have chosen nothing."""
    found = summary.read().get("confirmation", {})
    if not found.get("tasks"):
        return "No runs yet."
    rows = []
    for name in TASKS:
        if (one := found["tasks"].get(name)) is None:
            continue
        cells = [_confirmed(one.get(opponent)) for opponent in ("decayed", "rival")]
        rows.append(
            [
                f"{summary.task(name)['title']}, {summary.task(name)['metric']}",
                one["average"],
                *cells,
            ]
        )
    pooled = []
    for opponent, words in (("decayed", "decayed schedules"), ("rival", "other methods")):
        if (test := found["pooled"].get(opponent)) is not None:
            side = "in favor" if test["in favor"] else "against"
            by_sign = sign_test(test["positive"], test["tasks"] - test["positive"])
            pooled.append(
                f"against {words}, p = {test['p']:.2g} {side}; {test['positive']} of "
                f"{test['tasks']} means are positive, for which a sign test has p = {by_sign:.2g}"
            )
    first, *_, last = found["seeds"]
    caption = (
        f"Differences of test metrics on seeds {first} to {last}, paired, with 95% intervals; "
        "positive if the average is better, bold if the interval does not contain zero. Pooled "
        f"over tasks (Stouffer, Holm's correction for two tests): {'; '.join(pooled)}. "
        "Source: `results/evidence/confirmation/`, by `python -m benchmarks.evidence confirm`."
    )
    header = ["task", "best average", "− best decayed schedule", "− best other method"]
    return table(header, rows, caption, left=4)


def _confirmed(one: Document | None) -> str:
    if one is None:
        return ""
    low, high = one["interval"]
    mean = f"{one['mean']:+.2f}"
    shown = f"**{mean}**" if low > 0 or high < 0 else mean
    wanted = len(summary.read()["confirmation"]["seeds"])
    seeds = "" if one["pairs"] == wanted else f", {one['pairs']} seeds so far"
    return f"{shown} ({low:+.2f} to {high:+.2f}{seeds}), {one['label']}"


TABLES: dict[str, Callable[[], str]] = {
    "evidence-answer": answer,
    "evidence-situations": situations,
    "evidence-overview": overview,
    "evidence-by-optimizer": by_optimizer,
    "evidence-claims": claims,
    "evidence-confirmation": confirmation,
    **{f"evidence-{name}": partial(task, name) for name in TASKS},
    **evidence_details.TABLES,
}
