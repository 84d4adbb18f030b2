"""What is compared with AdamW: preconditioned feedback at several budgets, dense, what others published; and SGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsync_lab.papers import sweep
from sparsync_lab.papers.sweep import Method, Setting, Stage
from sparsync_lab.virtual.feedback_variants import ENTRY, ROW_COLUMN, TENSOR

GRID = (0.5, 0.7, 1.0, 1.4, 2.0)
BEYOND = (0.12, 0.18, 0.25, 0.35, 2.8, 4.0, 5.6, 8.0)
BUDGETS = (250, 100, 60, 40, 15)  # a worker sends one part in so many of what it would send dense
ADAMW_BUDGETS = BUDGETS[1:]  # the sketches of so small a GPT take a 210th with 16 workers
SGD_BUDGETS: Mapping[str, tuple[int, ...]] = {"resnet20": (40, 15), "vgg16": (250, 100, 40)}  # that hold sketches
MAIN_BUDGET, DEFAULT_BUDGET = 40, 60  # of the comparison with others; of attach, if it is not told

OWN_RATES = ", rates of its own"  # of a setting's title
GPT = Setting(
    "GPT on PTB", "gpt", 0.002, (600,), (0.02, 0.03), batch=4, clip=1.0, optimizer="adamw", weight_decay=0.01,
    warmup=0.1, factors=GRID, further=BEYOND,
)  # fmt: skip
SETTINGS: Mapping[str, Setting] = {
    "gpt": GPT,
    "gpt-w4": replace(GPT, workers=4, batch=16, like="gpt"),
    # Four workers send several per cent, and want a lower rate than sixteen.
    "gpt-w4-own": replace(GPT, title=f"{GPT.title}{OWN_RATES}", workers=4, batch=16, factors=(1.0, 1.4, 2.0),
                          further=(0.25, 0.35, 0.5, 0.7)),
    "gpt-w64": replace(GPT, workers=64, batch=1, seconds=(0.04, 0.06), like="gpt"),
    # Dense loses most to streams that are cut alike in every epoch: what is left of the distance without that.
    "gpt-windows": replace(GPT, title="GPT on PTB, random windows", windows="random", factors=(0.7, 1.0, 1.4),
                           further=(0.35, 0.5, 2.0, 2.8)),
    # 21 epochs: without dropout the last 15 of them only unlearn.
    "gpt-long": replace(GPT, title="GPT with dropout 0.2 on PTB", model="gpt-dropout", lengths=(2400,),
                        factors=(0.5, 1.0, 2.0), further=(0.125, 0.25, 4.0)),
    "vit": replace(GPT, title="ViT on CIFAR-10", model="vit", rate=0.001, lengths=(1400,), seconds=(0.02, 0.025),
                   batch=32),
    "resnet20-adamw": replace(GPT, title="ResNet-20 on CIFAR-10, AdamW", model="resnet20", rate=0.004, lengths=(1400,),
                              seconds=(0.0097, 0.012), batch=32, clip=None, warmup=0.03),
    "gpt2": replace(GPT, title="GPT-2 small on PTB", model="gpt2", rate=0.0006, lengths=(300,), seconds=(0.15, 0.25),
                    factors=(0.5, 1.0, 2.0), further=(0.25, 4.0)),
    "resnet20": replace(sweep.SETTINGS["resnet20"], title="ResNet-20 on CIFAR-10, SGD", lengths=(1400,)),
    "vgg16": replace(sweep.SETTINGS["vgg16"], title="VGG-16 on CIFAR-10, SGD"),
}  # fmt: skip


def preconditioned(budget: int) -> str:
    """Return the label of preconditioned feedback at a budget."""
    return f"preconditioned, 1/{budget}"


def by_default(budget: int) -> str:
    """Return the label of what ``attach`` does with SGD at a budget."""
    return f"default, 1/{budget}"


def preconditioned_sgd(budget: int) -> str:
    """Return the label of preconditioned feedback with SGD, which has to be asked for, at a budget."""
    return f"preconditioned SGD, 1/{budget}"


def _at(budget: int, **options: Any) -> dict[str, Any]:
    return {"budget": 1 / budget, **options}


MAIN = preconditioned(MAIN_BUDGET)
FACTORED, FACTORED_HALF = "dense, row x column v", "dense, row x column v, beta1 0.5"
DENSE_BETA2 = {beta: f"dense, beta2 {beta:g}" for beta in (0.99, 0.95)}
GRADIENT, DEMO = "gradient feedback + AdamW, 1/40", "DeMo, 1/40"
LOCO = {steps: f"SparseLoCo, every {steps} steps, 1/40" for steps in (15, 30)}
BASELINES = (GRADIENT, DEMO, *LOCO.values())

ROWS: Mapping[str, Method] = {
    m.label: m
    for m in (
        Method("dense", "dense"),
        *(Method(label, "dense", changes={"beta2": beta}) for beta, label in DENSE_BETA2.items()),
        Method(FACTORED, "dense", changes={"optimizer": "factored-adamw"}),
        Method(FACTORED_HALF, "dense", changes={"optimizer": "factored-adamw", "beta1": 0.5}),
        *(Method(preconditioned(budget), "default", _at(budget)) for budget in ADAMW_BUDGETS),
        *(Method(by_default(budget), "default", _at(budget)) for budget in BUDGETS),
        *(Method(preconditioned_sgd(budget), "default", _at(budget, precondition=True)) for budget in BUDGETS),
        Method(GRADIENT, "default", _at(40, precondition=False)),
        Method(DEMO, "demo", _at(40)),
        *(Method(label, "sparse-loco", _at(40, local_steps=steps)) for steps, label in LOCO.items()),
    )
}


def _change(what: str, budget: int = MAIN_BUDGET, changes: Mapping[str, Any] | None = None, **options: Any) -> Method:
    """Return an ablation: preconditioned feedback with one thing changed, and its rate."""
    label = f"ablation: {what}" if budget == MAIN_BUDGET else f"ablation: {what}, 1/{budget}"
    return Method(label, "default", _at(budget, **options), like=preconditioned(budget), changes=changes or {})


def _variant(what: str, beta2: float = 0.999, **variant: Any) -> Method:
    """Return an ablation that the library has no option for: fields of ``FeedbackVariant``, and the optimizer's."""
    return _change(what, changes={"variant": variant, "beta2": beta2})


# What the main budget comes to without bytes spent early: entries alone, chosen with the same density in every step.
EVEN_DENSITY = 0.0085
EVENLY = {"scope": "global", "values": "sign", "indices": "ef", "precondition": True, "density": EVEN_DENSITY}
BETAS = {40: (0.0, 0.5, 0.8, 0.9), 15: (0.0, 0.5, 0.8, 0.9), 100: (0.0, 0.8)}  # by budget, for the velocity
VARIANTS = (
    _variant("v of rows and columns, exact", second_moment=ROW_COLUMN),
    _variant("v of every entry, exact", second_moment=ENTRY),
    _variant("v of each tensor, one number", second_moment=TENSOR),
    _variant("own v of rows and columns, none shared", second_moment=ROW_COLUMN, own=True),
    _variant("own v of every entry, none shared", second_moment=ENTRY, own=True),
    _variant("v one step old", old=True),
    _variant("v one step old, no limit", old=True, limit=None),
    _variant("no limit", limit=None),
    *(_variant(f"limit {limit:g}", limit=limit) for limit in (1.0, 5.0)),
    *(_variant(f"floor {floor:g}", floor=floor) for floor in (0.0, 0.001, 0.1)),
    _variant("residual keeps its size when the rate falls", shrink=False),
    _variant("beta2 rises as 1 - t^-0.8", rise=0.8),
    *(_variant(f"beta2 {beta:g} from the start", beta2=beta, rise=None) for beta in (0.999, 0.99, 0.95)),
)
ALL_GATHER = _change("all-gather", collective="allgather")  # which 16 workers do anyway

ABLATIONS: Mapping[str, Method] = {
    m.label: m
    for m in (
        *VARIANTS,
        *(_change(f"beta1 {beta:g}", budget, beta=beta) for budget, betas in BETAS.items() for beta in betas),
        _change("beta2 rises to 0.95", changes={"beta2": 0.95}),  # to 0.99 it would in 2,154 steps
        _change("values levels", values="levels"),
        _change("values fp16", values="fp16"),
        _change("balanced", collective="balanced"),
        ALL_GATHER,
        Method("ablation: bytes spent evenly", "threshold", EVENLY, like=MAIN),
        _change("scope layer", scope="layer"),
    )
}

FIRST, OTHERS = (0,), (1, 2)
OF_GPT = tuple(label for label in ABLATIONS if label != ALL_GATHER.label)
BY_DEFAULT = tuple(map(by_default, (40, 100, 15, 250, 60)))
OF_RESNET = tuple(map(preconditioned_sgd, SGD_BUDGETS["resnet20"]))
OF_VGG = ("dense", *(label(budget) for budget in SGD_BUDGETS["vgg16"] for label in (by_default, preconditioned_sgd)))
STAGES = (
    Stage("gpt", 0, FIRST, ("dense", MAIN)),
    Stage("gpt", 0, FIRST, (GRADIENT, DEMO, FACTORED, FACTORED_HALF)),
    Stage("gpt", 0, OTHERS, ("dense", MAIN)),
    Stage("gpt-w4", 0, FIRST, ("dense", MAIN)),
    Stage("gpt", 0, FIRST, (preconditioned(100), preconditioned(15), *LOCO.values())),
    Stage("vit", 0, FIRST, ("dense", MAIN, GRADIENT)),
    Stage("gpt-w4-own", 0, FIRST, ("dense", MAIN)),
    Stage("gpt-w64", 0, FIRST, ("dense", ALL_GATHER.label, MAIN)),
    Stage("gpt-windows", 0, FIRST, ("dense", MAIN)),
    Stage("resnet20-adamw", 0, FIRST, ("dense", MAIN, GRADIENT)),
    Stage("gpt2", 0, FIRST, ("dense", MAIN, DEMO)),
    Stage("resnet20", 0, FIRST, ("dense", *BY_DEFAULT)),
    Stage("gpt", 0, FIRST, (preconditioned(DEFAULT_BUDGET),)),
    Stage("gpt", 0, OTHERS, (preconditioned(DEFAULT_BUDGET),)),
    Stage("gpt", 0, FIRST, tuple(DENSE_BETA2.values())),
    Stage("resnet20", 0, FIRST, OF_RESNET),
    Stage("gpt", 0, FIRST, OF_GPT),
    Stage("vgg16", 0, FIRST, OF_VGG),
    Stage("gpt-long", 0, FIRST, ("dense", MAIN, GRADIENT)),
    Stage("vit", 0, OTHERS, ("dense", MAIN, GRADIENT)),
    Stage("gpt-w64", 0, OTHERS, ("dense", MAIN)),
    Stage("gpt-w4", 0, OTHERS, ("dense", MAIN)),
    Stage("gpt-w4-own", 0, OTHERS, ("dense", MAIN)),
    Stage("resnet20-adamw", 0, OTHERS, ("dense", MAIN, GRADIENT)),
    Stage("resnet20", 0, OTHERS, ("dense", *BY_DEFAULT, *OF_RESNET)),
    Stage("vgg16", 0, OTHERS, OF_VGG),
    Stage("gpt", 0, OTHERS, (FACTORED, FACTORED_HALF, preconditioned(100), preconditioned(15), *BASELINES)),
    Stage("gpt-windows", 0, OTHERS, ("dense", MAIN)),
    Stage("gpt-long", 0, OTHERS, ("dense", MAIN)),
    Stage("gpt-w4", 0, FIRST, (GRADIENT, DEMO)),
    Stage("gpt-w64", 0, FIRST, (GRADIENT, DEMO)),
)

_TINY: dict[str, Any] = {"workers": 2, "batch": 2, "lengths": (30,), "limit": 32, "factors": (1.0,), "further": ()}
QUICK: Mapping[str, Any] = {
    "settings": {
        "gpt": replace(GPT, **_TINY),
        "vit": replace(SETTINGS["vit"], **_TINY | {"lengths": (4,)}),
        "gpt-long": replace(SETTINGS["gpt-long"], **_TINY | {"lengths": (6,)}),
        "gpt-windows": replace(SETTINGS["gpt-windows"], **_TINY | {"lengths": (6,)}),
        "gpt-ablations": replace(GPT, **_TINY | {"lengths": (6,)}, like="gpt"),
        "resnet20": replace(SETTINGS["resnet20"], **_TINY | {"lengths": (4,)}),
    },
    "stages": (
        Stage("gpt", 0, FIRST, ("dense", FACTORED_HALF, MAIN, preconditioned(15), GRADIENT, DEMO, LOCO[15])),
        Stage("vit", 0, FIRST, ("dense",)),
        Stage("gpt-ablations", 0, FIRST, (MAIN, *(m.label for m in VARIANTS))),
        Stage("gpt-windows", 0, FIRST, (MAIN,)),
        Stage("gpt-long", 0, FIRST, ("dense", MAIN)),
        Stage("resnet20", 0, FIRST, ("dense", by_default(15), preconditioned_sgd(15))),
    ),
}
