"""titan-disp: pre-training with the dispersion loss, as a TorchTitan 0.2.2 plugin.

TorchTitan imports this package when a config says ``[experimental] custom_import = "titan_disp"``; importing it
registers the train spec ``qwen3_disp``.
"""

from titan_disp import cpu

# Before anything else of TorchTitan is imported: its modules copy the device type at import.
cpu.install()

from titan_disp.spec import register  # noqa: E402

register()

__version__ = "0.1.0"
