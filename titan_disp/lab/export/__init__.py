"""This package loads a run's saved models on any machine, exports them to Hugging Face,
and generates text.
"""
