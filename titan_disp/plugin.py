"""The module that a config names as ``[experimental] custom_import =
"titan_disp.plugin"``, so that TorchTitan imports it.

The import registers the train specs of all models. Without an accelerator, it also
makes TorchTitan use the CPU.
"""

from titan_disp import cpu
from titan_disp.spec import register

cpu.install()
register()
