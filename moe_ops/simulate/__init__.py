"""Expert parallelism on paper: memory, bytes, time and balance of every dispatch format on up to 1024 ranks."""

from moe_ops.simulate.links import Links
from moe_ops.simulate.predict import Prediction, Scenario, advice, predict, predict_all
from moe_ops.simulate.routing import Routes, draw, popularity_of
from moe_ops.simulate.table import TimeTable

__all__ = [
    "Links",
    "Prediction",
    "Routes",
    "Scenario",
    "TimeTable",
    "advice",
    "draw",
    "popularity_of",
    "predict",
    "predict_all",
]
