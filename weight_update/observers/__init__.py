"""Ready observers of updates and workers: a log, a CSV file, a trace, and TorchRL's loggers.

Each of them is an :data:`~weight_update.report.Observer`.
"""

from weight_update.observers.chrome_trace import ChromeTraceObserver
from weight_update.observers.csv_file import CsvObserver
from weight_update.observers.log import LogObserver
from weight_update.observers.torchrl_logger import ScalarLogger, TorchRLLoggerObserver

__all__ = ["ChromeTraceObserver", "CsvObserver", "LogObserver", "ScalarLogger", "TorchRLLoggerObserver"]
