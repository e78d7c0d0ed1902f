"""titan-disp: pre-training with the dispersion loss, as a TorchTitan 0.2.2 plugin.

The package itself imports nothing, so that ``titan_disp.dispersion`` needs PyTorch
only. TorchTitan imports ``titan_disp.plugin``.
"""

__version__ = "0.1.0"
