"""Reports: tables, figures and one page from records of experiments. Nothing here imports torch."""

from aniso.record_files import read_records
from aniso.records import Record
from aniso.report.accuracy import details, table
from aniso.report.budgets import budgets
from aniso.report.complementarity import complementarity, gains
from aniso.report.figures import FIGURES, bars, boxes, draw_figure, few_shot_curves, heat_map, pareto
from aniso.report.files import build, draw_figures
from aniso.report.groups import experiments, mixed
from aniso.report.html_page import PageFigure, Section, page
from aniso.report.out_of_domain import out_of_domain
from aniso.report.predictions import TaskPredictions, class_table, confusion_table, run_predictions
from aniso.report.tables import Estimate, Table

__all__ = [
    "Record",
    "read_records",
    "experiments",
    "mixed",
    "Table",
    "Estimate",
    "table",
    "details",
    "complementarity",
    "gains",
    "budgets",
    "out_of_domain",
    "FIGURES",
    "draw_figure",
    "draw_figures",
    "few_shot_curves",
    "bars",
    "heat_map",
    "boxes",
    "pareto",
    "PageFigure",
    "Section",
    "page",
    "build",
    "run_predictions",
    "TaskPredictions",
    "class_table",
    "confusion_table",
]
