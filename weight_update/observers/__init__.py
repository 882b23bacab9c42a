"""Ready observers: a log, a CSV file, a trace, Prometheus, TensorBoard, and TorchRL's loggers.

Each of them is an :data:`~weight_update.Observer`.
"""

from weight_update.observers.chrome_trace import ChromeTraceObserver
from weight_update.observers.csv_file import CsvObserver
from weight_update.observers.log import LogObserver
from weight_update.observers.prometheus import PrometheusObserver
from weight_update.observers.scalars import ScalarLogger, ScalarObserver, TorchRLLoggerObserver
from weight_update.observers.tensorboard import TensorBoardObserver

__all__ = [
    "ChromeTraceObserver",
    "CsvObserver",
    "LogObserver",
    "PrometheusObserver",
    "ScalarLogger",
    "ScalarObserver",
    "TensorBoardObserver",
    "TorchRLLoggerObserver",
]
