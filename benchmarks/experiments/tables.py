"""The results as tables in Markdown, and their places in README.md."""

from typing import Any

Row = list[Any]

PICTURES = {
    "order": "Loss curves on 1, 2, 4 and 8 ranks with our loader and with the stock loader; spreads of held-out scores",
    "throughput": "Waiting for data in a training step; CPU of the loaders alone",
    "saves": "Bytes of state, time to save and to restore, by steps",
}
"""What the pictures of `pictures.py` show."""


def markdown(results: dict[str, Any]) -> dict[str, str]:
    """Picture, tables and verdicts, by the experiments that `results` holds."""
    makes = {"resize": resize, "order": order, "throughput": throughput, "saves": saves}
    parts: dict[str, str] = {}
    for name, one in results.items():
        verdicts = [[what, "yes" if held else "**no**"] for what, held in one["verdicts"].items()]
        picture = [f"![{PICTURES[name]}](../results/experiments_{name}.png)"] if name in PICTURES else []
        parts[name] = "\n\n".join([*picture, makes[name](one), table(["decided beforehand", "holds"], verdicts)])
    return parts


def insert(text: str, parts: dict[str, str]) -> str:
    """A page with tables put between its marks `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises:
        ValueError: the page lacks the marks of a part.
    """
    for name, part in parts.items():
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        _, closed, after = rest.partition(f"<!-- end of {name} -->\n")
        if not (found and closed):
            raise ValueError(
                f"The page has no place for {name}: put <!-- {name} --> and <!-- end of {name} --> into it."
            )
        text = f"{before}{found}\n{part}\n\n{closed}{after}"
    return text


def table(heads: list[str], rows: list[Row]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def resize(found: dict[str, Any]) -> str:
    rows: list[Row] = []
    for row in found["rows"]:
        if "refused" in row:
            rows.append([row["loader"], row["kind"], row["ranks"], f"refused: {row['refused']}", "", ""])
            continue
        more = f"loss gap {row['loss gap']:.0e}" if "loss gap" in row else ""
        if "share of rows seen before" in row:
            more = f"{row['share of rows seen before']:.0%} of rows trained on before"
        first = row["first difference"] or "none"
        rows.append([row["loader"], row["kind"], row["ranks"], f"{row['equal']} of {row['expected']}", first, more])
    return table(["loader", "what", "ranks", "global batches equal", "first that differs", ""], rows)


def order(found: dict[str, Any]) -> str:
    names = {
        "docs": "prose, nats a token", "code": "code, nats a token", "cloze": "cloze, points of accuracy",
    }  # fmt: skip
    columns = ("ours", "stock", "floor", "ours resized", "stock resized", "stock by ours")
    rows = [[names[metric], *(interval(one[column]) for column in columns)] for metric, one in found["spreads"].items()]
    scores = table(["held-out score", *columns], rows)
    sums = {
        loader: [sum(one) for one in zip(*rows.values(), strict=True)] for loader, rows in found["equal steps"].items()
    }
    said = "Global batches that are those of one rank: ours {} of {}, TorchTitan's {} of {}.".format(
        *sums["ours"], *sums["stock"]
    )
    return f"{scores}\n\n{said} The same run twice: losses differ by {found['twice']:g}."


def interval(value: list[float]) -> str:
    return f"{value[0]:.2g} ({value[1]:.2g} to {value[2]:.2g})"


def throughput(found: dict[str, Any]) -> str:
    names = {"text": "text, ours", "stock": "text, stock", "images": "images, ours", "stock_images": "images, stock"}
    trained = [
        [names[name], f"{1e3 * one['step_s']:.0f}", f"{1e3 * one['data_s']:.2f}", f"{one['data_share']:.1%}"]
        for name, one in found["trained"].items()
    ]
    alone: list[Row] = []
    for name, one in found["alone"].items():
        scale, unit = (1e3, "ms an image") if name.startswith("images") else (1e6, "s a Mtoken")
        rate = f"{one['per_s']:,.0f} images/s" if name.startswith("images") else f"{one['per_s'] / 1e6:.2f} Mtoken/s"
        fill = f"{one['token_fill']:.0%}" if "token_fill" in one else ""
        alone.append([name, rate, f"{one['cpu_s_per_unit'] * scale:.3g} {unit}", f"{one['peak_mb']:.0f}", fill])
    first = table(["inside training", "step, ms", "of it waiting for data, ms", "share"], trained)
    return first + "\n\n" + table(["alone", "rate", "CPU", "peak MB", "positions that are data"], alone)


def saves(found: dict[str, Any]) -> str:
    rows = [
        [
            row["loader"], row["kind"], row["lanes"] if row["loader"] == "ours" else "", row["step"],
            f"{row['state_bytes']:,}", f"{row['save_ms']:.2f}", f"{row['restore_s']:.3f}", f"{row['fresh_s']:.3f}",
            "yes" if row["exact"] else "**no**",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    heads = ["loader", "what", "lanes", "step", "bytes", "save, ms", "restore, s", "fresh, s", "goes on exactly"]
    return table(heads, rows)
