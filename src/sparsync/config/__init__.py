"""What a user asks for: methods by name, recipes, and the options of ``attach`` resolved into one plan."""

from sparsync.config.options import ExchangePlan, resolve
from sparsync.config.recipes import RECIPES

__all__ = ["RECIPES", "ExchangePlan", "resolve"]
