"""Results as plots, tables and one self-contained page; knows nothing of the other folders."""

from sparsync_lab.report.page import Figure, Page, Section, Text, render, write
from sparsync_lab.report.plots import Bar, BarChart, Chart, Curve, LineChart, png
from sparsync_lab.report.table import Row, Table, mean_and_std_text, times, write_csv

__all__ = [
    "Bar",
    "BarChart",
    "Chart",
    "Curve",
    "Figure",
    "LineChart",
    "Page",
    "Row",
    "Section",
    "Table",
    "Text",
    "mean_and_std_text",
    "png",
    "render",
    "times",
    "write",
    "write_csv",
]
