"""What TorchTitan imports where a config says ``[experimental] custom_import = "titan_disp.plugin"``.

Importing it registers the train specs of all models and, where there is no accelerator, makes the CPU TorchTitan's device.
"""

from titan_disp import cpu
from titan_disp.spec import register

cpu.install()
register()
