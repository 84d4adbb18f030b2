"""What P1 claims of times, and how that is judged."""

from __future__ import annotations

from sparsync_lab.papers.claim import Claim, Judgement, StoredTables, first_number, sentences, word_for

RESNET_50 = "25.6 M"  # entries
AUTHORS_PYTORCH = "Gaussian_k, authors' code (PyTorch)"
OURS, THEIRS = "Iteration time with P1's compute", "TopK-SGD with P1's 0.4 s"  # tables of p1/table2


def _selection(stored: StoredTables) -> Judgement:
    """Compare Top-k and Gaussian-k in plain PyTorch, at all sizes: alone, where that was measured, and with error
    feedback. What is told is ResNet-50's size, of which P1 gives a number."""
    told: list[str] = []
    faster: dict[str, list[bool]] = {}
    for table in stored.results["p1/fig4"].tables:
        forms = {"as printed": "Gaussian_k (PyTorch)", "in the authors' code": AUTHORS_PYTORCH}
        forms = {form: name for form, name in forms.items() if name in table.headings}
        at = [list(table.headings).index(name) for name in ("Top_k (torch.topk)", *forms.values())]
        times = {row.cells[0]: [first_number(row.cells[i]) for i in at] for row in table.rows}
        for number, form in enumerate(forms, 1):
            faster.setdefault(form, []).extend(own[number] < own[0] for own in times.values())
        how = "alone" if "alone" in table.caption else "with error feedback"
        top, *gauss = times.get(RESNET_50, [*times.values()][-1])
        own = ", ".join(f"{ms:.2f} {form}" for form, ms in zip(forms, gauss, strict=True))
        told.append(f"{how} torch.topk takes {top:.2f} ms, Gaussian-k in PyTorch {own}")
    ours = [stored.number("p1/fig4", "Time of selection with", RESNET_50, f"ours: {name}")
            for name in ("topk", "gaussian")]  # fmt: skip
    counts = ", ".join(f"{form} at {sum(own)} of {len(own)}" for form, own in faster.items())
    every = [each for own in faster.values() for each in own]
    kernels = f"our kernels take {ours[0]:.2f} and {ours[1]:.2f} ms with error feedback"
    sizes = f"of all sizes and ways to measure Gaussian-k is faster {counts}"
    return Judgement(f"H200, 25.6 M: {told[0]}", word_for(sum(every), len(every)), sentences(*told[1:], kernels, sizes))


def _order_of_times(stored: StoredTables) -> Judgement:
    """Compare dense and Top-k with P1's time of selection, and with ours."""
    models = [row.cells[0] for row in stored.table("p1/table2", THEIRS).rows]

    def slower(caption: str) -> int:
        pairs = [[stored.number("p1/table2", caption, model, name) for name in ("TopK", "Dense")] for model in models]
        return sum(top > dense for top, dense in pairs)

    top, dense = (stored.cell("p1/table2", THEIRS, "ResNet-50", name) for name in ("TopK", "Dense"))
    theirs, ours = slower(THEIRS), slower(OURS)
    here = f"for {theirs} of {len(models)} if selection takes P1's 0.4 s, for {ours} with an H200's"
    detail = sentences(f"with P1's 0.4 s ResNet-50 takes {top}, dense {dense}, in brackets as published")
    return Judgement(here, word_for(theirs + ours, 2 * len(models)), detail)


def _order_of_methods(stored: StoredTables) -> Judgement:
    """Compare P1's three sparse methods, with our time of selection."""
    names = ("Gaussian", "DGC", "TopK")
    rows = [row.cells[0] for row in stored.table("p1/table2", OURS).rows]
    times = [[stored.number("p1/table2", OURS, row, name) for name in names] for row in rows]
    first = sum(own[0] == min(own) for own in times)
    last = sum(own[2] == max(own) for own in times)
    at = times[rows.index("ResNet-50")]
    told = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in zip(names, at, strict=True))
    here = (
        f"with an H200's selection Gaussian-k is the fastest for {first} of {len(rows)}, Top-k the slowest for {last}"
    )
    measured = stored.results["p1/table2"].rows
    keys = list(zip(measured["model"], measured["method"], strict=True))
    sent, took = ({key: float(own or 0) for key, own in zip(keys, measured[name], strict=True)}
                  for name in ("sent", "selection_s"))  # fmt: skip
    share = sent["ResNet-50", "Gaussian"] / sent["ResNet-50", "TopK"]
    gauss, top = (1e3 * took["ResNet-50", name] for name in ("Gaussian", "TopK"))
    why = f"Gaussian-k sends {share:.2g} k there; its selection takes {gauss:.2f} ms, Top-k's {top:.2f}"
    return Judgement(here, word_for(first + last, 2 * len(rows)), sentences(f"ResNet-50: {told}", why))


CLAIMS = (
    Claim(
        "p1/fig4", "top-k selection is slow on GPUs, Gaussian-k faster",
        "V100, 25.6 M: top-k 400 ms, Gaussian-k nearly free", _selection,
    ),
    Claim(
        "p1/table2", "at 10 Gbit/s TopK-SGD is slower than dense", "4 of 4; ResNet-50 0.810 s against 0.699",
        _order_of_times,
    ),
    Claim(
        "p1/table2", "of the sparse methods GaussianK-SGD is the fastest, TopK-SGD the slowest",
        "4 of 4; ResNet-50 0.586, 0.655 (DGC), 0.810 s", _order_of_methods,
    ),
)  # fmt: skip
