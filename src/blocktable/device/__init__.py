"""Device tables: the host's block tables where the kernels read them. Needs torch; the core never imports this package."""

from blocktable.device.batch import Batch
from blocktable.device.tables import DeviceTables

__all__ = ["Batch", "DeviceTables"]
